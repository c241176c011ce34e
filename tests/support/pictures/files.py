"""Files of pictures: smaller PNG, and the recording of a terminal as SVG."""

from __future__ import annotations

import io
import re
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

_COLUMNS = 88
"""Width of a recorded terminal. The table at the end of `make run` has 86 columns with a home in /tmp."""

_SPEED = 8.0
"""How much faster than the run a recording is played."""

_LONGEST_PAUSE_S = 1.5
"""Maximum time between two lines of a recording."""

_SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
text {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px }}
@media (prefers-reduced-motion: no-preference) {{
.{unique_id}-matrix text {{ animation: appear 1ms both }}
@keyframes appear {{ from {{ opacity: 0 }} }}
}}
{styles}
</style>
<defs>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Rich's own format without its font, which a browser would download from another host, and with the animation."""


def compress(path: Path) -> None:
    """Reduce a PNG to 64 colours: less than a third of the size."""
    Image.open(path).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def recording(command: str, output: str) -> str:
    """Return an SVG that plays the output of a command once, and then shows all of it.

    A line appears at the seconds with which it begins, or together with the line before.
    """
    console = Console(record=True, width=_COLUMNS, file=io.StringIO())
    lines = [Text.from_ansi(line) for line in (f"$ {command}", *output.splitlines())]
    texts = [text for line in lines for text in line.wrap(console, _COLUMNS)]
    moments, seconds = [0.0], 0.0
    for text in texts[1:]:
        begins = re.match(r" *(\d+\.\d) s ", text.plain)
        pause = float(begins[1]) - seconds if begins else 0.0
        moments.append(moments[-1] + min(pause / _SPEED, _LONGEST_PAUSE_S))
        seconds += pause
    for text in texts:
        console.print(text, no_wrap=True)
    svg = console.export_svg(title=command, code_format=_SVG, unique_id="run")

    def delayed(found: re.Match[str]) -> str:
        return f'style="animation-delay:{moments[int(found[1])]:.1f}s" {found[0]}'

    return re.sub(r'clip-path="url\(#run-line-(\d+)\)"', delayed, svg)
