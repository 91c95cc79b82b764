"""Prints docs/overview.svg, the picture at the top of the README.

python docs/draw_overview.py > docs/overview.svg
"""

from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 1110, 388
LINE = 19  # pixels from one line of code to the next
NBSP = "\N{NO-BREAK SPACE}"  # SVG merges other spaces
LABEL = "A step becomes a program; passes make those of devices, trainers and servers from it"
STYLE = """\
  <style>
    text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328 }
    .title { font: 600 14px system-ui, Helvetica, Arial, sans-serif }
    .note { font: 13px system-ui, Helvetica, Arial, sans-serif; fill: #57606a }
    .new { fill: #116329; font-weight: 600 }
    .box { fill: #f6f8fa; stroke: #8c959f }
    .arrow { fill: none; stroke: #57606a; stroke-width: 1.5; marker-end: url(#head) }
  </style>
  <marker id="head" viewBox="0 0 8 8" refX="7" refY="4" orient="auto"
          markerWidth="8" markerHeight="8">
    <path d="M0 0 L8 4 L0 8 z" fill="#57606a"/>
  </marker>"""


@dataclass(frozen=True)
class Box:
    """A titled box of code; lines that begin with + are what a pass inserted."""

    x: int
    y: int
    width: int
    title: str
    code: str

    @property
    def height(self) -> int:
        return 44 + LINE * len(self.code.splitlines())

    @property
    def middle(self) -> int:
        return self.y + self.height // 2

    @property
    def right(self) -> int:
        return self.x + self.width

    def draw(self) -> list[str]:
        x, y = self.x + 14, self.y + 24
        size = f'width="{self.width}" height="{self.height}"'
        lines = [
            f'  <rect class="box" x="{self.x}" y="{self.y}" {size} rx="6"/>',
            f'  <text class="title" x="{x}" y="{y}">{escape(self.title)}</text>',
        ]
        for number, line in enumerate(self.code.splitlines(), start=1):
            style = ' class="new"' if line.startswith("+") else ""
            text = escape(line.removeprefix("+").replace(" ", NBSP))
            lines.append(f'  <text{style} x="{x}" y="{y + 4 + LINE * number}">{text}</text>')
        return lines


STEP = Box(
    20,
    133,
    296,
    "Your step, for one device",
    """\
def train_step(state, batch):
    loss, grads = ...
    updates, ... = tx.update(...)
    return {...}, loss""",
)
PROGRAM = Box(
    404,
    95,
    276,
    "Program: text, typed, verified",
    """\
forward
  loss = ...
backward
  b@GRAD = jax.reshape(...)
  w@GRAD = jax.dot_general(...)
optimize
  b = jax.add(b, ...)
  w = jax.add(w, ...)""",
)
DEVICES = Box(
    770,
    20,
    320,
    "Collective: on each device",
    """\
w@GRAD = jax.dot_general(...)
+w@GRAD = c_allreduce_sum(w@GRAD)
w = jax.add(w, ...)""",
)
TRAINER = Box(
    770,
    143,
    320,
    "Parameter servers: on each trainer",
    """\
w@GRAD = jax.dot_general(...)
+send(w@GRAD)
+w = recv()""",
)
SERVER = Box(
    770,
    266,
    320,
    "Parameter servers: on server 0",
    """\
+listen_and_serv()
+w@GRAD = sum(w@GRAD of each trainer)
w = jax.add(w, ...)""",
)


def arrow(path: str) -> str:
    return f'  <path class="arrow" d="{path}"/>'


def note(x: int, y: int, text: str) -> str:
    return f'  <text class="note" x="{x}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def draw() -> str:
    """Returns the picture: the step, its program, and the programs that passes make of it."""
    fork = PROGRAM.right + 60
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"',
        f'     width="{WIDTH}" height="{HEIGHT}" aria-label="{LABEL}">',
        STYLE,
        f'  <rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for box in (STEP, PROGRAM, DEVICES, TRAINER, SERVER):
        lines += box.draw()
    lines.append(arrow(f"M{STEP.right} {PROGRAM.middle} H{PROGRAM.x - 4}"))
    for box in (DEVICES, TRAINER, SERVER):
        lines.append(arrow(f"M{PROGRAM.right} {PROGRAM.middle} H{fork} V{box.middle} H{box.x - 4}"))
    lines += [
        note((STEP.right + PROGRAM.x) // 2, PROGRAM.middle - 10, "capture"),
        note((PROGRAM.right + fork) // 2, PROGRAM.middle - 10, "passes"),
        note(212, 360, "Passes insert the green lines; XLA compiles every program."),
        "</svg>",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(draw())
