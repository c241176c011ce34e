"""Sentences about what shoal has changed, with the holder and the pool that a change concerns."""

from __future__ import annotations


class Notice(str):
    """Sentence about a change to a pool or a job, and the pool and the holder that the change concerns.

    Args:
        text: The sentence.
        holder: The holder. None: the change concerns all holders on the pool, such as the end of a node.
        pool: Name of the pool. None: the change concerns no pool, such as the end of a process that was left over.
    """

    holder: str | None
    pool: str | None

    def __new__(cls, text: str, holder: str | None = None, pool: str | None = None) -> Notice:
        """Create the sentence."""
        made = super().__new__(cls, text)
        made.holder, made.pool = holder, pool
        return made

    @classmethod
    def of(cls, sentence: str) -> Notice:
        """Return a sentence as a notice. A plain sentence concerns no holder and no pool."""
        return sentence if isinstance(sentence, cls) else cls(sentence)
