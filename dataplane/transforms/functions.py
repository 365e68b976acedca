"""Names of user functions that workers call.

Code is named ("package.module:function") and never sent: a worker imports it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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

_imports: list[tuple[str, str]] = []


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
        module = given.partition(":")[0]
        if module == "__main__":
            raise _not_found(argument, given, "is part of the script itself")
        if _is_unguarded_script(module):
            raise _run_again(f"{argument}={given!r} is part of the script itself", argument)
        return given
    if not callable(given):
        raise ConfigError(
            f"{argument}={given!r:.80}: pass a function of a module, or its name as "
            '"package.module:function"',
            field=argument,
        )
    return _name_of(given, argument)


@contextmanager
def importing(argument: str, name: str) -> Iterator[None]:
    """Refuse loaders in this worker while it imports a function: the script with its training loop,
    imported by mistake, would run once more in each worker, and their loaders start workers, too.
    """
    _imports.append((argument, name))
    try:
        yield
    finally:
        _imports.pop()


def refuse_within_import() -> None:
    """Refuse to make a loader over urls.

    Raises:  ConfigError: a worker makes it while it imports a function.
    """
    for argument, name in _imports:
        module = name.partition(":")[0]
        raise _run_again(f"a worker made a loader when it imported {module!r}", argument)


def _is_unguarded_script(module: str) -> bool:
    """Whether this module is the file that Python runs, and its code runs on import, too."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if not file or module not in {spec.name if spec else "", re.sub(r"\.py$", "", Path(file).name)}:
        return False
    try:
        return file.endswith(".py") and b"__main__" not in Path(file).read_bytes()
    except OSError:
        return False


def _run_again(why: str, argument: str) -> ConfigError:
    return ConfigError(
        f"{why}, which workers import for {argument}=, and that would run its training code again: "
        "put the function into a module of its own, or the training code under "
        '`if __name__ == "__main__":`',
        field=argument,
    )


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
