"""The one way in which a command ends without its result."""


class CommandFailed(Exception):
    """The message is one sentence for the user: what is wrong and what to do."""
