"""The one error that stands for bad input: commands print it without a traceback."""


class InputError(ValueError):
    """Something the user gave is wrong. The message names the file, line or argument, and the mend."""
