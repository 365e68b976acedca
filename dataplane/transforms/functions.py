"""Names of user functions that workers call.

Code is named ("package.module:function") and never sent: a worker imports it.
"""

from __future__ import annotations

import re
import sys
from typing import Final

from dataplane.model.errors import ConfigError

GENERATOR: Final = "generator"
"""The parameter by which a function gets its random numbers."""
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_NAME_MAX = 400
_MOVE = (
    "move it into a module that this script imports, at the top level of that module, and pass it "
    'or its name, such as "mypackage.text:tokenise"'
)


def function_name(given: object, argument: str) -> str:
    """Return the name of a function or class, as "package.module:function"; "" for None.

    Raises:  ConfigError: a worker could not import it by its name; says what to do.
    """
    if given is None:
        return ""
    if isinstance(given, str):
        if len(given) > _NAME_MAX or not _NAME.fullmatch(given):
            raise ConfigError(
                f'{argument}={given!r:.80}: write it as "package.module:function", with one name '
                "after the colon",
                field=argument,
            )
        if given.partition(":")[0] == "__main__":
            raise _not_found(argument, given, "is part of the script itself")
        return given
    if not callable(given):
        raise ConfigError(
            f"{argument}={given!r:.80}: pass a function of a module, or its name as "
            '"package.module:function"',
            field=argument,
        )
    return _name_of(given, argument)


def _name_of(given: object, argument: str) -> str:
    module, path = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str):
        kind = type(given)
        raise ConfigError(
            f"{argument}: an object of {kind.__module__}.{kind.__qualname__} has no name by which "
            "a worker could find it: pass a function that calls it, or a class, which each worker "
            "instantiates once without arguments",
            field=argument,
        )
    if path.endswith("<lambda>"):
        raise _not_found(argument, "a lambda", "has no name")
    if "<locals>" in path:
        raise _not_found(argument, path.rpartition(".")[2], "is local to a function")
    if module == "__main__":
        raise _not_found(argument, path, "is part of the script itself")
    if "." in path and not hasattr(given, "__self__"):
        raise _not_found(argument, f"{module}:{path}", "is part of a class")
    if getattr(sys.modules.get(module), path, None) is not given:
        what = "is a method of an object" if hasattr(given, "__self__") else "names another object"
        raise _not_found(argument, f"{module}:{path}", what)
    return f"{module}:{path}"


def _not_found(argument: str, name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{argument}: {name} {why}, so workers, which are other processes, cannot import it: "
        f"{_MOVE}",
        field=argument,
    )
