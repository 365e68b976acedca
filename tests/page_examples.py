"""The Python examples of a page, one after the other, in its folder: see test_docs.py."""

import os
import sys

if __name__ == "__main__":
    folder, *sources = sys.argv[1:]
    os.chdir(folder)
    sys.path[0], sys.argv[1:] = "", []
    for source in sources:
        exec(compile(source, "<example>", "exec"), {"__name__": "__main__"})
