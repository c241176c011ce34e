"""What strangers type: odd texts, numbers, URLs and JSON, with a password where one can stand."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("SHOAL_EXAMPLES", "50"))
"""`make soak` sets 2,000."""

many = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES <= 100,  # `make test` tries the same examples each time; `make soak` looks for new ones
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),  # a home is shared by all examples on purpose: none may leave anything
)

SECRET = "hunter2-canary"
"""Stands wherever an entrance may be given a password; no message may repeat it."""

numbers = st.one_of(
    st.integers(-3, 5),
    st.floats(),
    st.booleans(),
    st.sampled_from([10**20, 10**400, -(2**63), 2**31, 1e308, 5e-324]),
)

number_texts = st.sampled_from(
    ["inf", "-inf", "nan", "1e400", "1e3", "9" * 20, "9" * 5000, "-1", "0", "1", "2.5", "0x10", "1_0", "٣", " 1"]
)

words = st.sampled_from(
    [
        "", " ", "x", "a-b", "Ä", "名", "a\0b", "\ud800", "a\nb", "\x1b[31m", "..", "../../x", "a/b", "/", "~",
        "none", "None", "null", "%00", "%zz", "%2e%2e%2f", "[::1", "[::1]", "*", "?", "[", "**", "{{ x }}", "$HOME",
        "-", "--help", "'", '"', "; DROP TABLE jobs", "a" * 41, "a" * 5000, "\u202e", "\uff0e", "~nobody",
    ]
)  # fmt: skip

texts = st.one_of(words, number_texts, st.text(max_size=20))

names = st.from_regex(r"[a-z0-9][a-z0-9-]{0,6}[a-z0-9]", fullmatch=True)


SCHEMES = st.sampled_from(["http://", "https://", "s3://", "file://", "postgresql://", "//", "http:", "x+y://"])


def urls(schemes: st.SearchStrategy[str] = SCHEMES, folder: str = "") -> st.SearchStrategy[str]:
    """URLs, half of them broken, some with a password. Their paths begin with the name of a folder, if one is given."""
    return st.builds(
        "{}{}{}{}{}{}".format,
        schemes,
        st.sampled_from(["", "", f"user:{SECRET}@", f":{SECRET}@", "@"]),
        st.sampled_from(["host", "10.0.0.5", "[::1", "[::1]", "", "Ä", "a b", "host\0"]),
        st.sampled_from(["", ":80", ":notaport", ":99999", ":-1", ":"]),
        st.one_of(st.just(""), words.map(f"{folder}/{{}}".format)),
        st.sampled_from(["", "?", "?a=1", "?a=1&a=2", "#f", "?%zz"]),
    )


def nested(depth: int) -> Any:
    """Lists and objects in one another."""
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


documents = st.recursive(
    st.one_of(st.none(), numbers, texts, st.sampled_from([50, 150]).map(nested)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=4,
)
"""JSON, and what Python takes for JSON: NaN, infinities, long integers, lone surrogates."""
