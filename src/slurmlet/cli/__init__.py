"""The command line: one file per command, named after it. Parses, calls one function of a lower room, prints."""
