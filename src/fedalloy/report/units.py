"""Numbers as people read them."""

from fedalloy.report.statistics import Estimate

ABSENT = "—"
UPLOAD, DOWNLOAD, TRAFFIC = "Upload", "Download", "Traffic"  # what every table and figure calls bytes
TRAFFIC_MEANS = "Upload: clients to server. Download: server to clients. Traffic: both."
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def byte_unit(largest: float) -> tuple[int, str]:
    """The divisor and name of the unit in which a number of bytes stays below 1024.

    >>> byte_unit(5_000_000)
    (1048576, 'MiB')
    """
    power = 0
    while power < len(BYTE_UNITS) - 1 and largest >= 1024 ** (power + 1):
        power += 1
    return 1024**power, BYTE_UNITS[power]


def in_bytes(count: float | None) -> str:
    """
    >>> in_bytes(12_345_678)
    '11.77 MiB'
    """
    if count is None:
        return ABSENT
    divisor, unit = byte_unit(count)
    return f"{count / divisor:.{2 if divisor > 1 else 0}f} {unit}"


def in_percent(value: Estimate | None) -> str:
    """
    >>> in_percent(Estimate(0.81234, 0.0045))
    '81.23 ± 0.45'
    """
    if value is None:
        return ABSENT
    return f"{100 * value.mean:.2f}" + (f" ± {100 * value.std:.2f}" if value.std is not None else "")


def in_seconds(seconds: float | None) -> str:
    """
    >>> in_seconds(3725.2), in_seconds(4.25)
    ('1 h 02 min', '4.2 s')
    """
    if seconds is None:
        return ABSENT
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def in_rounds(rounds: float) -> str:
    """
    >>> in_rounds(12.0), in_rounds(12.5)
    ('12', '12.5')
    """
    return f"{rounds:.1f}".removesuffix(".0")


def as_p_value(p_value: float | None) -> str:
    """
    >>> as_p_value(0.0321), as_p_value(1e-9)
    ('0.032', '< 0.001')
    """
    if p_value is None:
        return ABSENT
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def in_words(seconds: float) -> str:
    """A time as people say it.

    >>> in_words(40), in_words(600), in_words(40000), in_words(4e6)
    ('under a minute', '10 min', '11 h', '46 days')
    """
    if seconds < 60:
        return "under a minute"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.0f} days"
