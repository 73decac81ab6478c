"""Properties are checked on the same examples every time, however slow the machine."""

from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")
