"""What a runner needs of its node: scratch, unpacked images, child processes."""
