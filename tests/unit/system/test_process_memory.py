"""How a process prepares its memory before other processes are forked from it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sgpu_magic.system.processes import IS_LINUX

_UNMAPS = """
import re, numpy, ssl
from sgpu_magic.system.processes import unmap_file_pages
def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
changed = numpy.arange(100_000)
files, own = kilobytes("RssFile"), kilobytes("RssAnon")
unmap_file_pages()
print(files > 2 * kilobytes("RssFile"), abs(own - kilobytes("RssAnon")) < 500)
# relocated addresses, code and tables are there again
print(numpy.linalg.inv(numpy.eye(3)).sum(), int(changed.sum()), len(ssl.create_default_context().get_ciphers()) > 1)
"""


@pytest.mark.skipif(not IS_LINUX, reason="reads /proc")
def test_pages_of_files_are_given_back_and_come_again():
    done = subprocess.run([sys.executable, "-c", _UNMAPS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True True\n3.0 4999950000 True\n"), done.stderr
