"""A program forked from the zygote does what `python` would have done, to the last byte of its output."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shoal.runtime.warm import install, launchers

QUIET_S = 0.2
LIBRARIES = {
    "einops": "import os\nPRECISION = os.environ.get('EINOPS_PRECISION', 'float32')\nVERSION = 1\n",
    "optax": "import os\nRANK = os.environ.get('RANK')\n",
    "chex": "import threading, time\nthreading.Thread(target=time.sleep, args=(0.3,)).start()\n",
    "flax": "import sys\nsys.exit(2)\n",
    "jax": "import sys\nARGUMENTS = len(sys.argv)\n",
    "timm": "import os\nos.environ['TIMM_HOME'] = 'set at import'\n",
    "PIL": "import time\ntime.sleep(1.5)\n",
    "peft": "import os\nos._exit(4)\n",
}
"""Libraries by the names of well-known ones, which do at import what some of those do."""
FACTS = """
main = sys.modules["__main__"]
print(sys.argv, sys.orig_argv, sys.executable, sys.path, sys.flags, sys.gettrace(), os.getcwd())
plain = lambda value: value if isinstance(value, (str, type(None))) else type(value)
print({name: plain(value) for name, value in vars(main).items() if name.startswith("__")})
print(sys.warnoptions, warnings.filters, sys.meta_path[0].__class__.__name__, sys.excepthook)
print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGCHLD), signal.getsignal(signal.SIGINT))
print({name: value for name, value in sorted(os.environ.items()) if name not in ("_", "SHLVL")})
umask = os.umask(0)
print(umask, resource.getrlimit(resource.RLIMIT_NOFILE), os.nice(0), os.sched_getaffinity(0))
class A: field: int
print(A.__annotations__, sys.getrecursionlimit(), sys.stdout.line_buffering, sys.stdout.write_through)
"""
HEAD = "import os, resource, signal, sys, warnings\nimport einops\n"
MARK = "open('/proc/self/cwd/../forked', 'a').write(f'{\"shoal_warm.zygote\" in sys.modules} ')\n"
EINOPS = "print(einops.PRECISION, einops.VERSION)\n"
APP = "import zipfile; zipfile.ZipFile('app.pyz', 'w').write('a.py', '__main__.py')"
SPAWN = """
import multiprocessing, os, sys
def child(): print(__name__, __file__, os.getcwd())
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    print(process.exitcode, multiprocessing.process.ORIGINAL_DIR)
"""
RUNS_AT_IMPORT = """
import os, time
with open("metrics.csv", "a") as file:
    for step in range(3):
        print(step, file=file, flush=True)
time.sleep(1)
"""


@dataclass
class Case:
    """`run` in a folder with these files. `forked`: whether the starts in it are forks, in order."""

    run: str = "python a.py"
    files: dict[str, str] = field(default_factory=dict)
    forked: str = "True"
    zygote_for: str = "python a.py"
    python_path: str = ""
    is_early: bool = False
    """The command starts while the zygote imports."""


def script(text: str) -> dict[str, str]:
    return {"a.py": text.replace("import sys", "import os, sys", 1) + MARK}


CASES = {
    "arguments": Case("python a.py x '' -u --y", {"a.py": HEAD + MARK + FACTS}),
    "own -u": Case("python -u a.py -u root -u", {"a.py": HEAD + MARK + FACTS}),
    "relative path": Case("python ./a.py", {"a.py": HEAD + MARK + FACTS}, "False"),
    "full path": Case('python "$PWD/a.py"', {"a.py": HEAD + MARK + FACTS}),
    "odd path": Case("python .//a.py", {"a.py": HEAD + MARK + FACTS}, "False"),
    "link": Case("ln -s real.py a.py; python a.py", {"real.py": HEAD + MARK + FACTS}, "False"),
    "python3": Case("python3 a.py", {"a.py": HEAD + MARK + FACTS}, zygote_for="python3 a.py"),
    "python3 and not python": Case("python3 a.py", {"a.py": HEAD + MARK + FACTS}, "False"),
    "variable of the command": Case("EINOPS_PRECISION=float64 python a.py", script(HEAD + EINOPS), "False"),
    "other variable": Case("JAX_ENABLE_X64=1 python a.py", script(HEAD + EINOPS), "False"),
    "variable of the program": Case(
        files=script("import os, sys\nos.environ['EINOPS_PRECISION'] = 'float64'\nimport einops\n" + EINOPS)
    ),
    "variable of an own module": Case(
        files={
            **script("import os, sys\nimport settings\nimport einops\n" + EINOPS),
            "settings.py": "import os\nos.environ['EINOPS_PRECISION'] = 'float64'\n",
        }
    ),
    "variable of the library": Case(
        files=script("import os, sys\nimport timm\nprint(os.environ['TIMM_HOME'])\n")
    ),
    "path before the import": Case(
        files={
            **script("import sys\nsys.path.insert(0, 'vendor')\nimport einops\n" + EINOPS),
            "vendor/einops.py": "PRECISION, VERSION = '', 2\n",
        }
    ),
    "library beside the script": Case(
        files={**script(HEAD + EINOPS), "einops.py": "PRECISION, VERSION = '', 3\n"}
    ),
    "library written beside the script": Case(
        "echo \"PRECISION, VERSION = '', 4\" >einops.py; python a.py", script(HEAD + EINOPS), "False"
    ),
    "module of Python written beside the script": Case(
        "echo 'CONST = 4' >colorsys.py; python a.py",
        script("import sys, colorsys\nprint(hasattr(colorsys, 'CONST'))\n"),
        "False",
    ),
    "library upgraded": Case("echo VERSION=5 >>$SITE/einops.py; python a.py", script(HEAD + EINOPS), "False"),
    "library installed": Case(
        "mkdir $SITE/other; python a.py",
        script(HEAD + "import os\nprint(os.listdir(os.environ['SITE']))\n"),
        "False",
    ),
    "library upgraded while it is imported": Case(
        "sleep 0.5; echo X=1 >>$SITE/PIL.py; python a.py",
        script("import sys\nimport PIL\nprint(vars(PIL).get('X'))\n"),
        "False",
        is_early=True,
    ),
    "own module rewritten": Case(
        "echo X=2 >own.py; python a.py",
        {**script("import sys\nimport own\nprint(own.X)\n"), "own.py": "X = 1\n"},
    ),
    "script rewritten": Case(
        'sed -i \'s/^import einops/os.environ["EINOPS_PRECISION"] = "8"\\n&/\' a.py; python a.py',
        script(HEAD + EINOPS),
        "False",
    ),
    "umask": Case("umask 077; python a.py", {"a.py": HEAD + MARK + FACTS}, "False"),
    "limits": Case("ulimit -n 100; python a.py", {"a.py": HEAD + MARK + FACTS}, "False"),
    "nice": Case("nice -n 7 python a.py", {"a.py": HEAD + MARK + FACTS}, "False"),
    "affinity": Case("taskset -c 0 python a.py", {"a.py": HEAD + MARK + FACTS}, "False"),
    "batch": Case(
        "chrt -b 0 python a.py", script("import os, sys\nprint(os.sched_getscheduler(0))\n"), "False"
    ),
    "ignored signal": Case(
        "trap '' USR1; python a.py", script("import sys, signal\nprint(signal.getsignal(10))\n"), "False"
    ),
    "open file": Case(
        "python a.py <(echo config)", script("import sys\nprint(open(sys.argv[1]).read())\n"), "False"
    ),
    "no input": Case("python a.py <&-", script("import sys\nprint(sys.stdin)\n"), "False"),
    "input": Case("echo text | python a.py", script("import sys\nprint(sys.stdin.read())\n")),
    "spawned child": Case(files={"a.py": SPAWN + "    " + MARK}),
    "other directory": Case(
        "cd sub && python a.py",
        {"sub/a.py": SPAWN.replace('__main__":', '__main__":\n    ' + MARK.strip())},
        "False",
    ),
    "exception": Case(files=script("import sys\n\n\ndef f(): raise ValueError('bad')\n\n\n") | {}),
    "exit": Case(files=script("import sys\n") | {}),
    "zip file": Case(f'python -c "{APP}"; python app.pyz', script("import sys\n"), "False"),
    "package": Case(
        "python -m pkg",
        {
            "pkg/__init__.py": "print('package')\n",
            "pkg/__main__.py": "import sys\nfrom . import cli\nsys.exit(cli.main())\n",
            "pkg/cli.py": "import sys, __main__\n"
            + MARK
            + "def main():\n    print(__main__.__spec__.name)\n    return 3\n",
        },
        "False",
    ),
    "reads its rank": Case(files=script("import sys\nimport optax\nprint(optax.RANK)\n")),
    "reads the arguments": Case("python a.py 1 2", script("import sys\nimport jax\nprint(jax.ARGUMENTS)\n")),
    "starts a thread": Case(
        files=script("import sys\nimport chex, threading\nprint(threading.active_count())\n")
    ),
    "exits at import": Case(
        files=script("import sys\ntry: import flax\nexcept SystemExit as e: print(e.code)\n")
    ),
    "exits at import, first": Case(files=script("import sys\nimport flax\n"), forked=""),
    "ends the process at import": Case(files=script("import sys\nimport peft\n"), forked=""),
    "module that runs at import": Case(
        files={
            **script(
                "import importlib, sys\nimportlib.import_module('exp1')\nprint(open('metrics.csv').read())\n"
            ),
            "exp1.py": RUNS_AT_IMPORT,
        }
    ),
    "package on PYTHONPATH": Case(
        files={
            **script("import sys\nimport einops\nprint(einops.ROWS)\n"),
            "elsewhere/einops.py": RUNS_AT_IMPORT + "ROWS = open('metrics.csv').read()\n",
        },
        python_path="elsewhere",
    ),
}
CASES["exception"].files["a.py"] += "f()\n"
CASES["exit"].files["a.py"] += "sys.exit('a message')\n"
CASES["interrupt"] = Case(
    files={"a.py": CASES["exit"].files["a.py"].replace("sys.exit", "raise KeyboardInterrupt")}
)


class Task:
    """A folder in which one case runs, the same for both ways of starting."""

    def __init__(self, tmp_path: Path, case: Case) -> None:
        self.case, self.root, self.work = case, tmp_path / "task", tmp_path / "task" / "work"
        shutil.rmtree(self.root, ignore_errors=True)
        self.work.mkdir(parents=True)
        venv.create(self.root / "env", with_pip=False, symlinks=True)
        (self.site,) = (self.root / "env" / "lib").glob("*/site-packages")
        for name, text in LIBRARIES.items():
            (self.site / f"{name}.py").write_text(text)
        for name, text in case.files.items():
            (self.work / name).parent.mkdir(exist_ok=True)
            (self.work / name).write_text(text)
        self.stand_ins = f"{self.root}/stand-ins"
        own_path = f"{self.root}/env/bin:/usr/bin:/bin"
        python_path = f":{self.work}/{case.python_path}" if case.python_path else ""
        self.environment = {
            "PATH": f"{self.stand_ins}/bin:{own_path}",
            "PYTHONPATH": f"{self.stand_ins}/hook{python_path}",
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "BASH_ENV": f"{self.stand_ins}/bash_env",
            "PWD": str(self.work),
            "SITE": str(self.site),
        }
        install.install(self.stand_ins, own_path, self.environment)
        zygote = Path(self.stand_ins, "lib", "shoal_warm", "zygote.py")
        zygote.write_text(zygote.read_text().replace("QUIET_S = 2.0", f"QUIET_S = {QUIET_S}"))

    def start(self) -> tuple[int, str, str]:
        done = subprocess.run(
            ["/bin/bash", "-c", self.case.run],
            env={**self.environment, "RANK": "3", "SHOAL_RANK": "3"},
            cwd=self.work,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def forked(self) -> str:
        marks = (self.root / "forked", self.work / "forked")
        return "".join(path.read_text() for path in marks if path.exists()).strip()

    @contextlib.contextmanager
    def zygote(self) -> Iterator[subprocess.Popen[bytes]]:
        script = install.zygote_script(self.stand_ins, str(self.work), self.case.zygote_for)
        command = ["/bin/sh", "-c", script]
        with subprocess.Popen(
            command, env=self.environment, cwd=self.work, stdin=subprocess.DEVNULL
        ) as zygote:
            try:
                self.wait(zygote, launchers.KNOWN)
                if not self.case.is_early and not self.is_idle():
                    self.wait(zygote, launchers.IMAGE)
                yield zygote
            finally:
                zygote.kill()

    def is_idle(self) -> bool:
        """Whether the zygote has found no program to prepare for."""
        with contextlib.suppress(FileNotFoundError):  # it begins again
            return Path(self.stand_ins, launchers.KNOWN).read_text() == ""
        return False

    def wait(self, zygote: subprocess.Popen[bytes], name: str) -> None:
        deadline = time.monotonic() + 20
        while not Path(self.stand_ins, name).exists() and zygote.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("name", CASES)
def test_forked_program_does_what_python_does(tmp_path: Path, name: str) -> None:
    task = Task(tmp_path, CASES[name])
    Path(task.stand_ins, launchers.WARM).unlink()
    cold = task.start()
    assert "True" not in task.forked()
    task = Task(tmp_path, CASES[name])
    with task.zygote():
        warm = task.start()
        time.sleep(3 * QUIET_S)  # what it may do when the ranks are quiet, it does now
    assert warm == cold
    assert task.forked() == CASES[name].forked


SLOW = "import sys, time\nimport einops\ntime.sleep(float(sys.argv[1]))\n"


@pytest.mark.parametrize(
    "run",
    [
        "cd sub && python a.py 1",
        "EINOPS_PRECISION=float64 python a.py 1",
        "python -m pkg 1",
        "umask 022; python3 a.py 1",
        """python -c "$(cat a.py)" 1""",
    ],
)
def test_program_that_runs_long_is_forked_when_it_starts_again(tmp_path: Path, run: str) -> None:
    text = SLOW + MARK + EINOPS
    files = {"a.py": text, "sub/a.py": text, "pkg/__init__.py": "", "pkg/__main__.py": text}
    task = Task(tmp_path, Case(run, files, zygote_for="python other.py"))
    with task.zygote() as zygote:
        first = task.start()
        task.wait(zygote, launchers.IMAGE)
        assert task.start() == first
        assert task.start() == first
    assert task.forked().split() == ["False", "True", "True"]


def test_what_a_rank_imports_ends_neither_the_zygote_nor_other_ranks(tmp_path: Path) -> None:
    text = "import importlib, sys\nimport einops\nimportlib.import_module(sys.argv[1])\nprint('end')\n"
    task = Task(tmp_path, Case("python a.py chex & python a.py flax; wait", script(text)))
    with task.zygote() as zygote:
        code, output, _ = task.start()
        time.sleep(3 * QUIET_S)
        assert zygote.poll() is None
    assert (code, output) == (0, "end\n")
