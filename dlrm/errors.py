"""The one error that stands for bad input: commands print it without a traceback."""


class InputError(ValueError):
    """The user gave something wrong. The message names file, line or argument, and the mend."""
