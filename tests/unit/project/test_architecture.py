"""The shape of the code: who may import whom, how large things may grow, what must not appear at all."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "src" / "cohort"

# A part is a folder or module of the package, or a module inside a folder where that one has another layer.
LAYERS = {
    0: ("types", "fates", "errors", "user_code", "registry", "system", "sandbox"),
    1: ("config", "text", "tools", "tasks", "judge", "examples", "scoring", "recipes"),
    2: ("serialize", "world", "ranks", "algos", "data"),
    3: ("models",),
    4: ("engines", "learner"),
    5: ("rollout", "loops", "run", "evaluation", "logs", "plot"),
    6: ("jobs", "evaluation.standalone", "inspect", "chat", "sweep"),
    7: ("cli", "__main__", "__init__"),
}
LAYER = {part: layer for layer, parts in LAYERS.items() for part in parts}

# Besides its layer's rule: a part on the left never imports a part on the right.
NEVER = {
    "engines": {"learner"},
    "learner": {"engines"},
    "algos": {"tasks", "scoring", "recipes"},
    "data": {"tasks", "scoring", "recipes"},
}
# Layer 5 sees layers 3 and 4 only through these.
PROTOCOLS = {"engines.base", "engines.sync", "learner.base"}

# A third-party (or weighty standard) module, and where alone it may be imported.
WALLS = {
    "rich": ("logs", "cli", "inspect.explain.screen", "chat.screen"),
    "tyro": ("config.flags", "config.help", "config.load", "cli"),
    "yaml": ("config.yaml_text", "run"),
    "gguf": ("models.gguf",),
    "docstring_parser": ("tools.schema",),
    "jinja2": ("text",),
    "tokenizers": ("text",),
    "sqlite3": ("run.store", "tasks.search.index"),
    "transformers": ("models.auto",),
    "urllib": (
        *("models", "engines.site", "engines.fleet.calls"),
        *("system.http_connection", "system.http_text", "system.secrets"),
    ),
    "vllm": ("engines.vllm", "engines.fleet.in_vllm"),
    "multiprocessing": ("scoring",),
    "torch": (
        *("world", "ranks", "algos", "data", "models", "engines", "learner"),
        *("evaluation", "run", "loops", "jobs", "inspect"),
    ),
    # A search that compares vectors reads the weights of its sentence model itself: tasks are below models.
    "safetensors": ("serialize", "models", "run", "tasks.search.dense.model"),
    "wandb": ("logs.sinks.wandb_sink",),
    "tensorboard": ("logs.sinks.tensorboard_sink",),
    "trackio": ("logs.sinks.trackio_sink",),
    "math_verify": ("tasks.mathematics.symbolic",),
    "sympy": ("tasks.mathematics.symbolic",),
    "latex2sympy2_extended": ("tasks.mathematics.symbolic",),
    "langdetect": ("tasks.ifeval.instructions.language",),
    "reasoning_gym": ("tasks.reasoning_gym.package",),
    "textarena": ("tasks.textarena",),
    "huggingface_hub": ("models.hub",),
    "pyarrow": ("tasks.formats",),
    "datasets": ("tasks.places",),
    "triton": ("engines.native.cuda", "learner.kernels", "models.kernels"),
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "shelve", "marshal"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save"}
JSON_PLACE = "system.json_text"  # where JSON is parsed that others wrote
# Modules with their own answer to deep or odd JSON, and those that read only what they have just written.
OWN_JSON = {
    "sandbox.driver",  # runs in the sandbox, where no other module is
    *("serialize", "tasks.base", "tasks.calls", "tasks.countdown", "tasks.formats"),
    "tasks.ifeval.instructions.formats",
}
# Calls that write to a terminal, and the one module for each, which escapes what others wrote.
OUTPUT_CALLS = {
    "print": "logs.printing",
    "Console": "nowhere",
    "rich.print": "nowhere",
    "sys.stdout.write": "nowhere",
    "sys.stderr.write": "nowhere",
    "traceback.print_exc": "nowhere",
    "logging.Formatter": "nowhere",
}

# What only Linux has: names, and the beginnings of paths, with the modules that alone may use them, because they know
# what to do elsewhere. A place that no longer uses one fails the test.
LINUX_ONLY: dict[str, set[str]] = {
    "sched_getaffinity": {"system.kernel"},
    "prctl": {"system.kernel", "sandbox.kernel_calls"},
    "mallopt": {"system.process"},
    "RLIMIT_AS": {"system.kernel", "sandbox.spawner"},
    "ru_maxrss": {"system.kernel"},
    "F_FULLFSYNC": {"system.disk"},  # only macOS
    "/proc": {"system.kernel", "run.filesystem", "run.machine", "sandbox.root", "sandbox.spawner"},
    "/sys": {"system.kernel"},
    "/dev/shm": {"system.kernel"},
    # Calls that the sandbox makes or forbids: elsewhere `sandbox.find_missing` says that there is none.
    "unshare": {"sandbox.kernel_calls", "sandbox.filter"},
    "setns": {"sandbox.filter"},
    "memfd_create": {"sandbox.filter"},
    # Who asks which system it is: others ask for the call that they need.
    "sys.platform": {"system.kernel", "system.process"},
}
LINUX_ONLY |= {
    name: set()
    for name in (
        *("sched_setaffinity", "pidfd_open", "pidfd_send_signal", "waitid", "eventfd", "epoll"),
        *("posix_fadvise", "posix_fallocate", "preadv", "pwritev", "copy_file_range", "splice", "sendfile"),
        *("O_TMPFILE", "O_DIRECT", "O_PATH", "inotify", "fdatasync", "getrandom"),
    )
}

# Named exceptions; they may only shrink: an entry that is no longer needed fails the test.
LONG_FILES = {"engines.native.cuda.engine"}  # one class, whose parts are modules already
LONG_FUNCTIONS: set[str] = set()
BROAD_EXCEPTS = {
    "user_code",  # the boundary around users' files, tasks, recipes and algorithms
    "scoring.worker",  # the boundary around foreign graders
    "scoring.concurrent",  # the same, where several of them run at once
    "logs.view",  # a terminal that breaks must not stop a run
    "inspect.check.run",  # a loss that raises is a finding
    "plot.picture",  # a picture that cannot be drawn must not fail the run whose card shows it
    "models.auto",  # the boundary of transformers: its classes raise what they like about a broken folder
    "tasks.reasoning_gym.package",  # the boundary of reasoning-gym: its data sets and graders raise what they like
    "tasks.mathematics.equality",  # sympy and its parser raise every kind of error
    "sandbox.driver",  # in the sandbox, around the functions of a model's program
    "tasks.textarena",  # games of the package raise what they like where they do not start
    "tools.run",  # the boundary around the functions of users that a model calls
    "tools.schema",  # annotations of users may raise anything when they are read
    "engines.fleet.engine",  # a replica that cannot be started again for any reason must not take requests
    "engines.fleet.served",  # whatever an engine process raises is said to the program that uses it
    "text.markup",  # the tokenizers library raises bare Exception for every malformed file
}

# Lines of code: blank lines, comments and docstrings are free, or the budget would be paid in clarity. The hard limits
# are on all lines.
FILE_CODE, FILE_HARD = 320, 500
FUNCTION_CODE, FUNCTION_HARD = 60, 80
MAX_PARAMETERS = 8
# Nine settings of its own: the alternative was to set one of them from outside after construction.
# A stream is given its rows' limit too, because it reads them when it is made.
MANY_PARAMETERS = {"learner.local:__init__": 9, "tasks.stream:__init__": 9}
# What every training run is made of: all but the areas and tools below. It was 12,000 before records had a
# serialisation, rollouts a producer, learners backends and runs kinds: boundaries cost lines. It was 13,000 before
# names told what things do and each value was assigned on a line of its own. It was 13,500 before users' own code,
# words of other tools, damaged runs, changed inputs and hostile files were all met with a message that helps. It was
# 16,900 before models were compared with the free memory and answers shown in columns, which is not for one tool alone.
# It was 17,050 before help and prose were wrapped on terminals, and a mistyped name led to the nearest run, for all
# commands.
# It was 17,300 before supervised fine-tuning on any rows and preference optimisation. It was 18,800 before references
# were kept in files, pairs came from rewards, SFT and DPO measured the accuracy of a task and read rows through a
# user's function, users had tools and environments with limits and outcomes of calls, turns had advantages of their
# own, and engines kept the keys and values of conversations between turns. It was 21,000 before rewards asked outside
# services, with many answers at once, a journal and keys, groups were scored together, rewards were any number, and
# tables of run.db had turns. It was 22,300 before several ranks trained together, with the optimizer, the whole model
# or every matrix divided among them. It was 25,000 before engines sampled in processes of their own, which may die and
# get their weights by files, before every load of weights was proved, and before sums of gradients overlapped the
# backward.
MAX_PACKAGE = 26_300
AREAS = {  # leaves that nothing of it imports, or doors to other people's programs
    # The traces that SFT imitates among them, and the notations of mathematical answers. It was 4,600 before questions
    # that are answered by a search, and recipes for SFT and DPO on tasks and public data. It was 5,700 before programs
    # were judged by tests, functions of other tools scored answers, tasks could be mixed, games were played, and the
    # data sets of reasoning-gym, whose settings become those of the task and whose graders need screens. It was 7,800
    # before a search could compare vectors: a sentence model in numpy, so that workers need no torch, the processes
    # that compute it with one thread each, and a cache that several processes share.
    ("tasks", "recipes"): 8_500,
    # A language model behind a server as a reward: its prompt, parsing and cache.
    ("judge",): 720,
    # A door to programs that models write, and what keeps them behind it.
    ("sandbox",): 1_050,
    # It was 1,200 before vLLM trained: it loads weights, is compared, sleeps, and leaves the process as it was.
    (
        *("models.auto", "engines.auto", "engines.vllm", "engines.pending", "engines.sums"),
        *("engines.server", "engines.site"),
    ): 1_310,
    # Servers of vLLM and SGLang that sample for training: how each is started and asked, and the requests under way.
    # It was 1,080 before vLLM's workers opened memory of their GPU, through which weights reach them, and 1,160 before
    # replies that cannot be were refused and servers were probed before a run.
    (
        *("engines.fleet.calls", "engines.fleet.dialect", "engines.fleet.in_vllm", "engines.fleet.program"),
        *("engines.fleet.server", "engines.fleet.servers", "engines.fleet.session"),
        *("engines.fleet.sglang_server", "engines.fleet.vllm_server"),
    ): 1_200,
    (*("models.catalog", "models.download", "models.hub", "models.shards", "models.gguf", "cli.pull"),): 1_350,
    # A terminal, conversations of several models, a task's problems, and files. It was 1,100 before a file had the
    # whole chat, and problems of the validation split were offered, 1,200 before episodes with tools were played, and
    # 1,500 before graders in a chat were given keys and lines of a pipe could go on.
    ("chat", "cli.chat"): 1_550,
    # Two outputs, a picture and text for terminals of any size. As a tool it had 1,000 before a curve that ends early
    # had its reason below it.
    ("plot", "cli.plot"): 1_150,
    # Plan, processes, stop rules, table and prediction of time: a scheduler of its own above the runs. It was 1,800
    # before the table fitted narrow terminals and said how sure the winner is, and 2,050 before it left out runs that
    # are lost or not as planned, and 2,100 before runs without evaluations were compared by their training reward.
    ("sweep", "cli.sweep", "cli.sweep_output", "cli.sweep_progress"): 2_150,
    # As tools these two had 1,000 each before they knew examples and pairs besides groups: three kinds of run with a
    # report of their own, and checks of rows, templates and pairs. Checks had 1,650 before judges were rehearsed and
    # rewards could be any number, and 1,750 before the model's own samples and the right answers of all rows counted.
    ("inspect.check", "cli.check"): 1_850,
    ("inspect.explain", "cli.explain"): 1_480,
    # Runs evaluate too. It was 1,000 before wrong names had answers at once and comparisons called runs by their names.
    # It was 1,100 before evaluations had conversations.
    # It was 1,150 before mean rewards stood beside accuracies, with Student's distribution, which sweeps use too.
    # It was 1,250 before several ranks divided the problems of an evaluation.
    ("evaluation", "cli.eval", "cli.compare"): 1_350,
    # The table of runs: more than a tool has, because it fits every terminal and knows sweeps and damaged runs.
    # It was 1,060 before runs could have a mean reward in place of an accuracy, and settings that depend on others, and
    # 1,100 before it showed settings as the user gave them.
    (
        *("inspect.runs", "cli.runs", "run.summary", "run.swept", "run.activity"),
        *("config.differences", "config.regular_yaml"),
    ): 1_150,
}
MAX_TOOL = 1_000
TOOLS = (  # what only looks at runs, configs and machines
    ("inspect.bench", "models.limits", "cli.bench"),
    ("inspect.replay", "cli.replay"),
    ("logs.sinks",),
)
MAX_LOOP = 40
# Modules of the light layers that need numpy. They are imported when a search needs them, and by no other module.
LATE = {f"tasks.search.dense.{name}" for name in ("index", "model", "processes", "vectors")}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def dotted(path: Path) -> str:
    """`engines.native.engine` for a file of the package; `__init__` for its root."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if len(parts) > 1 and parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def part_of(name: str) -> str:
    """The longest part in LAYERS that holds the module `name`; its first word where none does."""
    words = name.split(".")
    prefixes = [".".join(words[:n]) for n in range(len(words), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in LAYER), words[0])


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every imported module with its line, wherever in the file; `from a import b` counts as a and as a.b."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            module = node.module or ""
            if module == "cohort":
                yield from ((f"cohort.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield module, node.lineno
                if module.startswith("cohort."):
                    inner = PACKAGE.joinpath(*module.split(".")[1:])
                    for alias in node.names:
                        if (inner / f"{alias.name}.py").exists() or (inner / alias.name).is_dir():
                            yield f"{module}.{alias.name}", node.lineno


def own_imports(path: Path) -> Iterator[tuple[str, int]]:
    for name, line in imports(path):
        if name.startswith("cohort."):
            yield name.removeprefix("cohort."), line


def is_inside(name: str, places: tuple[str, ...] | set[str]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{dotted(path)}:{node.name}", node


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_every_module_has_a_layer() -> None:
    unknown = sorted({part_of(dotted(path)) for path in modules()} - LAYER.keys())
    assert not unknown, f"give these a layer in LAYERS: {unknown}"


def test_imports_point_downwards() -> None:
    wrong = []
    for path in modules():
        here = part_of(dotted(path))
        for name, line in own_imports(path):
            there = part_of(name)
            if there == "__version__":
                continue
            if LAYER[there] > LAYER[here] or there in NEVER.get(here, set()):
                wrong.append(f"{path.relative_to(ROOT)}:{line} {here} (layer {LAYER[here]}) imports {name}")
    assert not wrong, "\n".join(wrong)


def test_layer_five_sees_engines_and_learner_as_protocols() -> None:
    wrong = []
    for path in modules():
        if LAYER[part_of(dotted(path))] != 5:
            continue
        for name, line in own_imports(path):
            if LAYER[part_of(name)] in (3, 4) and name not in PROTOCOLS | {part_of(p) for p in PROTOCOLS}:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}; allowed: {sorted(PROTOCOLS)}")
    assert not wrong, "\n".join(wrong)


def test_third_party_walls() -> None:
    wrong = []
    for path in modules():
        for name, line in imports(path):
            top = part_of(name)
            if top in WALLS and not is_inside(dotted(path), WALLS[top]):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {top}; allowed in: {WALLS[top] or 'nowhere'}")
    assert not wrong, "\n".join(wrong)


def test_third_party_imports_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    optional = (
        "data",
        "hub",
        "math",
        "ifeval",
        "reasoning-gym",
        "vllm",
        "gguf",
        "cuda",
        "wandb",
        "tensorboard",
        "trackio",
        "transformers",
    )
    declared = [*project["dependencies"], *(e for name in optional for e in extras[name])]
    names = {re.split(r"[<>=!~\[; ]", entry)[0].lower().replace("-", "_") for entry in declared}
    names |= {"yaml"} if "pyyaml" in names else set()
    used = {part_of(name) for path in modules() for name, _ in imports(path)}
    foreign = used - set(sys.stdlib_module_names) - {"cohort"}
    assert foreign <= names, f"imported but not in pyproject.toml: {sorted(foreign - names)}"


def test_no_pickle_and_no_eval() -> None:
    wrong = []
    for path in modules():
        for name, line in imports(path):
            if part_of(name) in FORBIDDEN_MODULES:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {ast.unparse(node.func)}")
    assert not wrong, "\n".join(wrong)


def test_output_goes_through_one_place() -> None:
    wrong = []
    for path in modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and OUTPUT_CALLS.get(ast.unparse(node.func), dotted(path)) != dotted(path):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {ast.unparse(node.func)}")
    advice = "use print_result or print_note of logs.printing, make_console of logs.console, or EscapingFormatter"
    assert not wrong, "\n".join([*wrong, advice])


def test_json_of_others_is_parsed_in_one_place() -> None:
    """`json.loads` raises RecursionError for deep nesting, which is no ValueError and so easily forgotten."""
    wrong, own = [], set()
    for path in modules():
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("json.loads", "json.load"):
                continue
            is_copy = ast.unparse(node.args[0]).startswith("json.dumps(")
            if dotted(path) in OWN_JSON:
                own.add(dotted(path))
            elif dotted(path) != JSON_PLACE and not is_copy:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls json.loads; use parse_json of {JSON_PLACE}")
    assert not wrong, "\n".join(wrong)
    assert own == OWN_JSON, f"gone: {OWN_JSON - own}"


def test_broad_excepts_are_named() -> None:
    """Catching everything is for the boundary of foreign code; cleaning up and raising again is not that."""
    found = set()
    for path in modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler):
                caught = "BaseException" if node.type is None else ast.unparse(node.type)
                again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("suppress", "contextlib.suppress"):
                caught, again = ast.unparse(node), False
            else:
                continue
            if re.search(r"\b(Exception|BaseException)\b", caught) and not again:
                found.add(dotted(path))
    assert found == BROAD_EXCEPTS, f"new: {found - BROAD_EXCEPTS}; gone: {BROAD_EXCEPTS - found}"


def find_linux_only(path: Path) -> set[str]:
    """The keys of LINUX_ONLY that the code of a file uses, as a name, an attribute or a text."""
    found = set()
    docstrings = {
        id(node.value)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute):
            found |= {node.attr, ast.unparse(node)}
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found |= {node.value} | {key for key in LINUX_ONLY if key[0] == "/" and node.value.startswith(key + "/")}
    return found & LINUX_ONLY.keys()


def test_what_only_linux_has_is_used_where_a_fallback_is() -> None:
    used: dict[str, set[str]] = {key: set() for key in LINUX_ONLY}
    for path in modules():
        for key in find_linux_only(path):
            used[key].add(dotted(path))
    assert used == LINUX_ONLY


def find_code_lines(path: Path) -> set[int]:
    """The numbers of the lines that do something: not those of blank lines, comments and docstrings."""
    source = path.read_text(encoding="utf-8")
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for t in tokens if t.type not in skipped for line in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def code_lines(path: Path) -> int:
    return len(find_code_lines(path))


def test_file_sizes() -> None:
    lines = {dotted(path): len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    huge = {name: n for name, n in lines.items() if n > FILE_HARD}
    assert not huge, f"files over {FILE_HARD} lines: {huge}"
    long = {dotted(path) for path in modules() if code_lines(path) > FILE_CODE}
    wrong = f"over {FILE_CODE} lines of code: {sorted(long - LONG_FILES)}; gone: {LONG_FILES - long}"
    assert long == LONG_FILES, wrong


def test_package_size() -> None:
    sizes = {dotted(path): code_lines(path) for path in modules()}
    budgets = {**AREAS, **dict.fromkeys(TOOLS, MAX_TOOL)}
    total = sum(size for name, size in sizes.items() if not any(is_inside(name, part) for part in budgets))
    assert total <= MAX_PACKAGE, f"the package has {total} lines of code, more than {MAX_PACKAGE}"
    for part, most in budgets.items():
        own = sum(size for name, size in sizes.items() if is_inside(name, part))
        assert 0 < own <= most, f"{part[0]} has {own} lines of code, more than {most}"


def test_function_sizes() -> None:
    long = set()
    for path in modules():
        code = find_code_lines(path)
        for name, node in functions(path):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            assert len(lines) <= FUNCTION_HARD, f"{name} has {len(lines)} lines, more than {FUNCTION_HARD}"
            if len(code.intersection(lines)) > FUNCTION_CODE:
                long.add(name)
    wrong = f"over {FUNCTION_CODE} lines of code: {long - LONG_FUNCTIONS}; gone: {LONG_FUNCTIONS - long}"
    assert long == LONG_FUNCTIONS, wrong


def test_parameter_counts() -> None:
    wrong = []
    for path in modules():
        for name, node in functions(path):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([n for n in names if n not in ("self", "cls")])
            most = MANY_PARAMETERS.get(name, MAX_PARAMETERS)
            if count > most and not is_kernel(node):
                wrong.append(f"{name} takes {count} parameters, more than {most}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_the_training_loop_fits_on_a_screen(kind: str) -> None:
    loops = [
        node
        for node in ast.walk(tree(PACKAGE / "loops" / f"{kind}.py"))
        if isinstance(node, ast.For) and ".steps(" in ast.unparse(node.iter)
    ]
    assert len(loops) == 1, f"loops/{kind}.py has one loop, over run.steps()"
    length = (loops[0].end_lineno or 0) - loops[0].lineno
    assert length <= MAX_LOOP, f"the loop's body has {length} lines, more than {MAX_LOOP}"


def test_config_and_cli_import_without_torch() -> None:
    light = [path for path in modules() if LAYER[part_of(dotted(path))] in (0, 1, 7) and dotted(path) not in LATE]
    names = ["cohort" if dotted(path) == "__init__" else f"cohort.{dotted(path)}" for path in light]
    heavy = {"torch", "transformers", "numpy", "rich", "gguf"}
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(sorted({heavy!r} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", f"imported on the way: {done.stdout}"


def project_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]
    skipped = {".git", ".venv", ".venv-vllm", ".venv-peers", ".venv-kernels", "runs", "build", "dist"}
    return [p for p in ROOT.rglob("*") if p.is_file() and not skipped & set(p.relative_to(ROOT).parts)]


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("package registry host", r"(pypi|pythonhosted|npmjs|crates|anaconda|conda)" + r"\.(org|io|com)\b"),
        ("wheel index host", r"download\.pytorch" + r"\.org"),
        ("path of one machine", r"(?<![\w.<{}])/(work|root|home|Users|opt|tmp/coord)" + r"/[\w.]"),
    ],
)
def test_files_name_no_hosts_and_no_machine_paths(what: str, pattern: str) -> None:
    found = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # weights and pictures
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, f"{what}:\n" + "\n".join(found)


def test_the_page_of_files_is_up_to_date() -> None:
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.path[:0] = ['scripts']; import file_tree; print(file_tree.make_page(), end='')",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    assert page == found.stdout, "docs/files.md is old; run python scripts/file_tree.py"
