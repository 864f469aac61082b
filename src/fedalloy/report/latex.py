"""Any text as LaTeX prints it, whatever a user or a data set named."""

import re

_ORDINARY = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "|": r"\textbar{}",
    "<": "$<$",
    ">": "$>$",
    # At the start of a row \\ and \midrule would take these for their own arguments.
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
    "\u00a0": "~",
    "\u200b": "{}",
    "“": "``",
    "”": "''",
    "—": "---",
    "–": "--",
    "…": r"\ldots{}",
    "†": r"$\dagger$",
}
_MATHS = {
    "±": r"\pm",
    "×": r"\times",
    "≥": r"\geq",
    "≤": r"\leq",
    "−": "-",
    "→": r"\rightarrow",
    "√": r"\surd",
    "‖": r"\|",
    "²": "^2",
    "³": "^3",
}
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau",
    "φ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Δ": "Delta", "Λ": "Lambda", "Σ": "Sigma", "Ω": "Omega",
}  # fmt: skip
_PRINTED = str.maketrans(
    _ORDINARY
    | {letter: f"${maths}$" for letter, maths in _MATHS.items()}
    | {letter: rf"$\{name}$" for letter, name in _GREEK.items()}
)
_BLANK = re.compile(r"[^\S\u00a0]+|[\x00-\x1f\x7f]+")  # an empty line would end a caption

_DASHES = re.compile("-(?=-)")  # two would be printed as one long dash


def latex(text: str) -> str:
    r"""
    >>> latex("fedprox(mu=0.1) & 50 % --lr ± [δ]")
    'fedprox(mu=0.1) \\& 50 \\% -{}-lr $\\pm$ {[}$\\delta${]}'
    """
    apart = _DASHES.sub("-\u200b", _BLANK.sub(" ", text))
    return apart.translate(_PRINTED)
