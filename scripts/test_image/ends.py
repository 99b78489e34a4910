"""How a run ends, if not well."""


class Failed(Exception):
    """The image is not as it must be."""


class CannotRun(Exception):
    """This machine lacks what the test needs."""
