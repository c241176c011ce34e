"""``python -m tests.support.reference``."""

from tests.support.reference import write

write()
