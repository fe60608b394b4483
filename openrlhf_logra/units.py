"""Quantities for people."""


def bytes_text(count: float) -> str:
    """Bytes in decimal units with three digits: 61.2 kB, 1.6 MB."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while abs(count) >= 999.5 and len(units) > 1:
        count /= 1000
        units.pop(0)
    text = f"{count:,.0f}" if abs(count) >= 99.95 else f"{count:.3g}"
    return f"{text} {units[0]}"


def seconds_text(seconds: float) -> str:
    """A duration: 48 s, 9 min 5 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"
