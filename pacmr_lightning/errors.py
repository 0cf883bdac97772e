"""The one exception that means: the input is wrong and the user can mend it."""


class UserError(ValueError):
    """Bad input. The message is one sentence that names the offending value and the fix.

    The command line prints the message alone, without a traceback, and exits with status 2.
    """
