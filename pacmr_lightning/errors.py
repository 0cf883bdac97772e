"""The one exception that means: the input is wrong and the user can mend it."""


class UserError(Exception):
    """Bad input. The message is one sentence that names the offending value and the fix.

    No ValueError: jsonargparse would take those for a type mismatch and bury the message.

    The command line prints the message alone, without a traceback, and exits with status 2.
    """
