"""The panels of the report: which metrics each one shows, and how one is drawn.

To add a panel, add an entry to `PANELS`. A panel is a stack of strips that share the step axis; a strip has one unit
and therefore one axis (two measures of different units get two strips, never two scales on one).
"""

import io
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html import escape
from typing import TYPE_CHECKING

from openrlhf_logra.report.reader import Points
from openrlhf_logra.units import bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
PANEL_INCHES = (6.4, 3.7)
HEADER_INCHES = 0.5

# Role -> (light, dark). The picture is light; in the page each role is a CSS variable of that name. The light colours
# must differ from each other: they are what tells the roles apart in matplotlib's SVG.
COLORS = {
    "paper": ("#ffffff", "#16181c"),
    "ink": ("#1d2126", "#e4e6ea"),
    "muted": ("#626a73", "#9aa2ab"),
    "grid": ("#e3e6ea", "#2e3238"),
    "blue": ("#2a78d6", "#4a94ea"),
    "orange": ("#d9622b", "#e8814e"),
}


@dataclass(frozen=True)
class Series:
    """One line, or one row of points.

    Attributes:
        tag: tag of the scalar; a `*` matches any text, and what several tags match is averaged step by step.
        label: name in the legend.
        color: a role of `COLORS`.
        look: "line", "smooth" (every step faint, their running mean on top), "points" or "dashed".
    """

    tag: str
    label: str
    color: str = "blue"
    look: str = "line"


@dataclass(frozen=True)
class Strip:
    """Series of one unit on one axis. `scale` is "linear", "zero" (linear, from zero) or "log"."""

    label: str
    series: tuple[Series, ...]
    scale: str = "linear"
    in_bytes: bool = False


@dataclass(frozen=True)
class Panel:
    """One figure of the report: a title, a sentence for the page, and strips above each other."""

    title: str
    note: str
    strips: tuple[Strip, ...]


PANELS = (
    Panel(
        "Reward",
        "Mean reward of the rollouts at each step, and mean score of one answer to a held-out problem (pass@1).",
        (
            Strip(
                "Reward",
                (
                    Series("train/rollout/reward_mean", "rollout reward", look="smooth"),
                    Series("eval/eval_*_pass1", "held-out pass@1", "orange", "points"),
                ),
            ),
        ),
    ),
    Panel(
        "Step size",
        "Alpha, the step along the update direction, and the norm of the update relative to the weights.",
        (
            Strip("Alpha", (Series("train/logra/alpha", "alpha"),), "zero"),
            Strip("Update ratio", (Series("train/logra/update_ratio", "update ratio"),), "zero"),
        ),
    ),
    Panel(
        "KL per update",
        "KL per token that updates were predicted to cost, did cost, and might cost; means over a step's updates.",
        (
            Strip(
                "KL",
                (
                    Series("train/logra/kl_budget", "budget", "muted", "dashed"),
                    Series("train/logra/predicted_kl", "predicted"),
                    Series("train/logra/realized_kl", "realised", "orange", "points"),
                ),
                "log",
            ),
            Strip("Mismatch", (Series("train/logra/mismatch", "mismatch"),), "zero"),
        ),
    ),
    Panel(
        "Sync per step",
        "Bytes of the weight sync after each step, against the full weights in bf16; the legend gives medians.",
        (
            Strip(
                "Bytes sent",
                (
                    Series("train/logra/sync_dense_bytes", "full weights", "muted", "dashed"),
                    Series("train/logra/sync_bytes", "LoGRA"),
                ),
                "log",
                in_bytes=True,
            ),
        ),
    ),
    Panel(
        "Gradient and responses",
        "Norm of the actor's gradient as the trainer logs it, and mean length of a response.",
        (
            Strip("Gradient norm", (Series("train/actor_grad_norm", "gradient norm", look="smooth"),)),
            Strip(
                "Response, tokens",
                (Series("train/rollout/response_length_mean", "response length", look="smooth"),),
            ),
        ),
    ),
)


def points_of(scalars: dict[str, Points], pattern: str) -> Points:
    """Finite points of the tags that match, averaged where several have one at the same step, in order of step."""
    values: dict[int, list[float]] = {}
    for tag, points in scalars.items():
        if fnmatchcase(tag, pattern):
            for step, value in points.items():
                if math.isfinite(value):
                    values.setdefault(step, []).append(value)
    return {step: sum(values[step]) / len(values[step]) for step in sorted(values)}


def panels_with_data(scalars: dict[str, Points]) -> list[Panel]:
    """The panels of `PANELS` that have something to show, each reduced to the strips and series that have."""
    panels = []
    for panel in PANELS:
        strips = []
        for strip in panel.strips:
            series = tuple(one for one in strip.series if shown_points(scalars, strip, one))
            if series:
                strips.append(Strip(strip.label, series, strip.scale, strip.in_bytes))
        if strips:
            panels.append(Panel(panel.title, panel.note, tuple(strips)))
    return panels


def shown_points(scalars: dict[str, Points], strip: Strip, series: Series) -> Points:
    """Points of a series that its strip can show: on a log axis, those above zero."""
    points = points_of(scalars, series.tag)
    return {step: value for step, value in points.items() if value > 0} if strip.scale == "log" else points


def running_mean(values: list[float]) -> list[float]:
    """Centred mean over about a tenth of the points (so it does not lag), over those that exist at both ends."""
    reach = len(values) // 20 if len(values) >= 20 else int(len(values) >= 8)
    windows = (values[max(0, index - reach) : index + reach + 1] for index in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def step_range(panels: list[Panel], scalars: dict[str, Points]) -> tuple[float, float]:
    """First and last step over all panels with a small margin: every panel has the same step axis."""
    series = [one for panel in panels for strip in panel.strips for one in strip.series]
    steps = [step for one in series for step in points_of(scalars, one.tag)]
    margin = 0.03 * (max(steps) - min(steps)) or 0.5
    return min(steps) - margin, max(steps) + margin


def number_text(largest: float) -> Callable[[float, object], str]:
    """Tick labels for an axis that ends at `largest`: 1,500 or 0.35, and 6e-5 where everything is tiny."""

    def text(value: float, _: object = None) -> str:
        if 0 < largest < 2e-3 and value:
            mantissa, exponent = f"{value:.3e}".split("e")
            return f"{float(mantissa):g}e{int(exponent)}"
        return f"{value:,.10g}" if abs(value) < 1e6 else f"{value:.3g}"

    return text


def draw_strip(axes: "Axes", strip: Strip, scalars: dict[str, Points]) -> None:
    """Draw one strip on its axes; colours are the light ones of `COLORS`."""
    light = {role: pair[0] for role, pair in COLORS.items()}
    for series in strip.series:
        points = shown_points(scalars, strip, series)
        steps, values = list(points), list(points.values())
        label = series.label
        if strip.in_bytes:  # figures that cannot be read off a log axis
            label += f", {bytes_text(statistics.median(values))}"
        # A line of one point would be invisible without its marker; a line along zero, half hidden if clipped.
        style = {"color": light[series.color], "linewidth": 2, "clip_on": False}
        style |= {"marker": "o"} if len(steps) == 1 else {}
        if series.look == "points":
            edge = {"markersize": 7, "markeredgecolor": light["paper"]}
            axes.plot(steps, values, "o", color=light[series.color], label=label, zorder=4, **edge)
        elif series.look == "smooth":
            axes.plot(steps, values, **{**style, "linewidth": 1}, alpha=0.3, zorder=2)
            axes.plot(steps, running_mean(values), **style, label=label, zorder=3)
        else:
            line = (0, (3.5, 2)) if series.look == "dashed" else "-"
            axes.plot(steps, values, **style, linestyle=line, label=label, zorder=3)

    scale_axes(axes, strip)
    axes.set_ylabel(strip.label, color=light["muted"])
    axes.grid(axis="y", color=light["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, colors=light["muted"])
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(light["grid"])
    if len(strip.series) > 1:
        # Above the axes, at the right end of the title's line: there it never covers data.
        place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": len(strip.series)}
        space = {"borderpad": 0, "borderaxespad": 0.6, "handlelength": 2.4, "columnspacing": 1.6}
        axes.legend(**place, **space, frameon=False, labelcolor=light["ink"])


def scale_axes(axes: "Axes", strip: Strip) -> None:
    """Limits and ticks of a strip, from the data already drawn on it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = axes.dataLim.intervaly
    if strip.scale == "log":
        axes.set_yscale("log")
        axes.set_ylim(low / 1.6, high * 1.6)
        decades = math.log10(high / low)
        subs = (1.0, 2.0, 5.0) if decades < 1 else (1.0, 3.0) if decades < 2 else (1.0,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
        axes.set_ylim(0 if strip.scale == "zero" and low >= 0 else low - margin, high + margin)
        axes.yaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], min_n_ticks=3))
    text = (lambda value, _: bytes_text(value)) if strip.in_bytes else number_text(max(map(abs, axes.get_ylim())))
    axes.yaxis.set_major_formatter(FuncFormatter(text))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))


def draw_panel(
    figure: "Figure", panel: Panel, scalars: dict[str, Points], steps: tuple[float, float], title: bool
) -> None:
    """Draw one panel on a figure or subfigure of its own; `steps` are the limits of its step axis."""
    column = figure.subplots(len(panel.strips), 1, sharex=True, squeeze=False)[:, 0]
    for axes, strip in zip(column, panel.strips):
        draw_strip(axes, strip, scalars)
    column[-1].set_xlim(*steps)
    column[-1].set_xlabel("Step", color=COLORS["muted"][0])
    figure.align_ylabels(column)
    if title:
        column[0].set_title(panel.title, loc="left", fontsize=12, fontweight="bold", color=COLORS["ink"][0])


def render_png(panels: list[Panel], scalars: dict[str, Points], heading: str) -> bytes:
    """All panels in one picture, two beside each other; the last of an odd number takes the whole row."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / 2)
    width, height = PANEL_INCHES[0] * 2, PANEL_INCHES[1] * rows + HEADER_INCHES
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 10}):
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor=COLORS["paper"][0])
        FigureCanvasAgg(figure)
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
        figure.suptitle(heading, x=0.15 / width, ha="left", fontsize=11, color=COLORS["muted"][0], parse_math=False)
        grid = figure.add_gridspec(rows, 2)
        steps = step_range(panels, scalars)
        for index, panel in enumerate(panels):
            row, column = divmod(index, 2)
            last_alone = index == len(panels) - 1 and column == 0
            place = grid[row, :] if last_alone else grid[row, column]
            draw_panel(figure.add_subfigure(place, facecolor="none"), panel, scalars, steps, title=True)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def render_svg(panel: Panel, scalars: dict[str, Points], steps: tuple[float, float], prefix: str) -> str:
    """One panel as an <svg> to be placed inside HTML: no namespaces, its ids prefixed, its colours CSS variables."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style = {"font.family": "DejaVu Sans", "font.size": 10, "svg.fonttype": "none", "svg.hashsalt": prefix}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=PANEL_INCHES, layout="constrained", facecolor="none")
        FigureCanvasSVG(figure)
        draw_panel(figure, panel, scalars, steps, title=False)
        for axes in figure.axes:
            axes.set_facecolor("none")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<title>.*?</title>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(
        r'^<svg[^>]*viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{escape(panel.title)}">', svg
    )
    for role, (light, _) in COLORS.items():
        svg = svg.replace(light, f"var(--{role})")
    return svg.strip()
