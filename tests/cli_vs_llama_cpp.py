#!/usr/bin/env python3
"""The comparison script checks itself (parsers, order of runs, failures); no engine is needed for that."""
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = os.path.join(ROOT, "bench", "vs_llama_cpp.py")

sys.exit(subprocess.run([sys.executable, SCRIPT, "--self-test"], check=False).returncode)
