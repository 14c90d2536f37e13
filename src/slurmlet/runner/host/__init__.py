"""What a runner needs of its node: the sandbox, scratch, unpacked images, child processes."""
