module slurmlet.io/upstream/runc

go 1.26.0

godebug default=go1.26

tool github.com/opencontainers/runc

require github.com/opencontainers/runc v1.5.2
