"""Parts of Python's standard library, as far as the runner needs them, without what makes them slow to load.

Every pod waits for its runner to load, and most of that is enumerations, regular expressions and named tuples that the
standard library makes at import and the runner never looks at. What does the work is written in C and loads in no time;
these modules are thin Python around it, under the names and with the meaning of the originals. Type checkers see the
originals. Whatever is not here, or is not needed before a container runs, is taken from the standard library.
"""
