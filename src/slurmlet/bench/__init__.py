"""Measurements against bare Slurm, in the same run, interleaved. Never part of a test."""
