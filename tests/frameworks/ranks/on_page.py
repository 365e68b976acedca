"""One rank that runs an example of a page: its text, in the folder where its shards are."""

import os
import sys
import warnings

text, folder = sys.argv[1:]
warnings.filterwarnings("ignore")
os.chdir(folder)
exec(compile(text, "<example>", "exec"), {"__name__": "__main__"})
