"""Answers that try to pass tests without solving the problem. The problem: f(n) returns n * n + 7919, a secret rule."""

from __future__ import annotations

# What each program does instead. None of them knows what f is to return.
TAMPERING = {
    "exits": "import sys\nsys.exit(0)",
    "exits-at-once": "import os\nos._exit(0)",
    "exits-in-the-call": "import os\ndef f(n):\n    os._exit(0)",
    "raises-exit": "def f(n):\n    raise SystemExit(0)",
    "nothing": "def f(n):\n    return None",
    "equals-everything": (
        "class All:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    def __hash__(self): return 0\ndef f(n):\n    return All()"
    ),
    "equal-int": "class All(int):\n    def __eq__(self, other): return True\ndef f(n):\n    return All(0)",
    "equal-text": (
        "class All(str):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
        "def f(n):\n    return All('0')"
    ),
    "reflected": (
        "class All(float):\n    __eq__ = lambda s, o: True\n    __sub__ = __rsub__ = lambda s, o: 0.0\n"
        "    __abs__ = lambda s: 0.0\ndef f(n):\n    return All()"
    ),
    "not-a-number": "def f(n):\n    return float('nan')",
    "new-builtins": (
        "import builtins\nbuiltins.abs = builtins.len = lambda *_: 0\nbuiltins.bool = lambda *_: True\n"
        "builtins.isinstance = lambda *_: True\nbuiltins.AssertionError = type('E', (Exception,), {})\n"
        "def f(n):\n    return 1"
    ),
    "new-json": "import json\njson.dumps = lambda value, **_: '{\"value\": true}'\ndef f(n):\n    return 1",
    "new-driver": (
        "import sys\nmain = sys.modules['__main__']\nmain.do_call = lambda *_: {'value': True}\n"
        "main.encode_value = lambda v: True\ndef f(n):\n    return 1"
    ),
    "writes-results": (
        "import os\nfor n in range(9):\n    os.write(3, b'%d {\"value\": true}\\n' % n)\ndef f(n):\n    return 1"
    ),
    "writes-results-with-the-word": (
        "import sys\ndef f(n):\n    frame = sys._getframe(1)\n    while 'request' not in frame.f_locals:\n"
        "        frame = frame.f_back\n    word = frame.f_locals['request']['word']\n    import os\n"
        "    for i in range(9):\n        os.write(3, f'{word} {i} {{\"value\": true}}\\n'.encode())\n    return 1"
    ),
    "searches-its-memory": (
        "import gc\ndef f(n):\n    objects = [o for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]\n"
        "    found = [t for t in map(repr, objects) if 'expec' + 'ted' in t]\n    return found[0] if found else 0"
    ),
    "reads-its-input": "import os\nos.write(3, b'x')\ndata = os.read(0, 100000)\ndef f(n):\n    return data",
    "reads-files": (
        "import os\nfound = []\nfor folder, _, names in os.walk('/'):\n"
        "    found += [n for n in names if n in ('problems.json', 'rows.jsonl')]\n"
        "def f(n):\n    return found[0] if found else 0"
    ),
    "prints-success": "print('1 passed', 'OK', True)\ndef f(n):\n    print('OK')\n    return 'OK'",
    "exit-handler": "import atexit, os\natexit.register(os._exit, 0)\ndef f(n):\n    return 0",
    "another-thread": (
        "import threading, os, time\ndef work():\n    time.sleep(0.01)\n    os.write(3, b'0 {\"value\": true}\\n')\n"
        "    os._exit(0)\nthreading.Thread(target=work).start()\ndef f(n):\n    time.sleep(1)"
    ),
    "traces": (
        "import sys\ndef trace(frame, event, arg):\n    for name in list(frame.f_locals):\n"
        "        frame.f_locals[name] = True\n    return trace\nsys.settrace(trace)\ndef f(n):\n    return True"
    ),
    "a-huge-result": "def f(n):\n    return list(range(10 ** 7))",
    "a-deep-result": "def f(n):\n    x = []\n    for _ in range(900):\n        x = [x]\n    return x",
    "a-circle": "def f(n):\n    x = []\n    x.append(x)\n    return x",
    "colliding-keys": "def f(n):\n    return {i * (2 ** 61 - 1): 0 for i in range(9000)}",
    "many-digits": "import sys\nsys.set_int_max_str_digits(0)\ndef f(n):\n    return 10 ** 100000",
    "half-a-character": "def f(n):\n    return '\\ud800'",
    "a-name-of-python": "f = print",
    "itself": "import program\ndef f(n):\n    return program",
}
