"""The one progress bar of a run, with the time left."""

from __future__ import annotations

from time import perf_counter
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


class Clock:
    """Time left, from the pace of the steps finished so far.

    Parameters
    ----------
    pace
        Expected seconds per unit of cost; used until a step has finished.
    remaining
        Cost of all steps still to come.
    """

    def __init__(self, pace: float, remaining: float) -> None:
        self._pace = pace
        self._remaining = remaining
        self._cost = 0.0
        self._seconds = 0.0
        self._current = 0.0
        self._started = perf_counter()

    def start(self, cost: float) -> None:
        """A step of this cost begins."""
        self._current, self._started = cost, perf_counter()

    def finish(self) -> None:
        """The step begun last has ended."""
        self._cost += self._current
        self._seconds += perf_counter() - self._started
        self._remaining -= self._current
        self._current = 0.0

    def left(self) -> float:
        """Seconds left; a step that overruns does not eat into the time of those after it."""
        pace = self._seconds / self._cost if self._cost else self._pace
        elapsed = perf_counter() - self._started
        return max(0.0, pace * self._current - elapsed) + pace * (self._remaining - self._current)


class Bar:
    """A bar on stderr for work whose cost is known beforehand.

    Parameters
    ----------
    total, remaining
        Cost of the whole run, and of what is still to do: work finished earlier fills the bar, but says nothing about
        today's pace.
    pace
        Expected seconds per unit of cost.
    shown
        Off: nothing is printed.
    """

    def __init__(self, *, total: float, remaining: float, pace: float, shown: bool) -> None:
        self._clock = Clock(pace, remaining)
        self._cost = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            _TimeLeft(self._clock),
            console=(console := Console(stderr=True)),
            refresh_per_second=2,
            disable=not shown,
        )
        self._console = console
        self._task = self._bar.add_task("", total=total)
        self._bar.advance(self._task, total - remaining)

    def start(self, name: str, cost: float) -> None:
        """The step of this name and cost begins."""
        self._cost = cost
        self._clock.start(cost)
        self._bar.update(self._task, description=name)

    def finish(self) -> None:
        """The step begun last has ended."""
        self._clock.finish()
        self._bar.advance(self._task, self._cost)

    def say(self, line: str) -> None:
        """Print a line on stderr, above the bar; also where no bar is shown."""
        self._console.print(Text(line), soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class _TimeLeft(ProgressColumn):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def render(self, task: Task) -> Text:
        minutes, seconds = divmod(round(self._clock.left()), 60)
        return Text(f"{minutes}:{seconds:02d} left", style="progress.remaining")
