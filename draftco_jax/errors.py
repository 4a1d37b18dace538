"""The one exception type that reaches the user as a single line with exit code 2."""


class UserError(ValueError):
    """Bad input: the message is one line with the name, the value, the rule and the way out."""
