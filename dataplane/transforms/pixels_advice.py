"""Advice about packages: how a host decodes JPEGs fast, or makes the same pixels as another host.
Imports nothing.

The software that makes pixels has a name (`pixels_library.Maker.name`): "libjpeg-turbo 2.1.5,
kernels 79c2f673; Pillow 13.0.0 (…)". It begins with "kernels" if Pillow decodes JPEGs.
"""

from __future__ import annotations

from typing import Final

INSTALL_LIBJPEG: Final = (
    "install a C compiler and libjpeg-turbo's headers (apt-get install gcc libjpeg-dev; dnf "
    "install gcc libjpeg-turbo-devel; conda install -c conda-forge c-compiler libjpeg-turbo), "
    "then reinstall Dataplane; a wheel of Dataplane needs neither"
)


def how_to_agree(expected: str, found: str) -> str:
    """Advise how to change the host whose maker is `found` so that it agrees with `expected`."""
    expected_c, _, expected_pillow = expected.rpartition("; ")
    found_c, _, found_pillow = found.rpartition("; ")
    expected_has, found_has = (name.startswith("libjpeg") for name in (expected_c, found_c))
    steps = []
    if expected_has and not found_has:
        steps.append(f"on the host where Pillow decodes JPEGs, {INSTALL_LIBJPEG}")
    elif found_has and not expected_has:
        steps.append(
            f"on the host where the job started, Pillow decodes JPEGs: there, {INSTALL_LIBJPEG}"
        )
    elif found_c != expected_c:
        steps.append("install the same Dataplane on both, and the same libjpeg-turbo: one wheel")
    if found_pillow != expected_pillow:
        version = expected_pillow.removeprefix("Pillow ").partition(" ")[0]
        steps.append(f"install the same build of Pillow on both: pip install pillow=={version}")
    return "All hosts of a job must make the same pixels: " + "; ".join(steps)
