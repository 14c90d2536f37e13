module slurmlet.io/upstream/coredns

go 1.26.0

godebug default=go1.26

tool github.com/coredns/coredns

require github.com/coredns/coredns v1.14.7
