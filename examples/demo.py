# SPDX-License-Identifier: Apache-2.0
"""Hot-swap a real vLLM engine between two checkpoints, break two updates on purpose, and look what still answers.

    python examples/demo.py             # what `make demo` runs
    python examples/demo.py --json      # the same as one JSON document; progress goes to stderr
    python examples/demo.py --family qwen2tied

Two tiny random checkpoints A and B are made (once) below `build/demo`. Stock vLLM loads each of them cold, in a
process of its own: what those answer and hold is what is right. Then the same sequence of updates runs twice, in two
more processes: on stock vLLM (`WEIGHTLIFE=0`), and after `weightlife.install()`. After every step the engine is
compared with the cold load of the checkpoint that should be serving: greedy tokens, top-20 log-probabilities and a
digest of every tensor that the model reaches, all exactly.

The exit status is 0 only if everything held under weightlife and both sides began exact. Nothing below is canned.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import torch
    from vllm import LLM

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD = REPOSITORY / "build" / "demo"
SCHEMA_VERSION = 1
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that we look into
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",  # on two cores, threads that spin take the core from the one they wait for
    "PYTHONWARNINGS": "ignore",
}
CHILD_TIMEOUT = 240  # seconds; each child needs 10 to 40 on two cores
PIECES = 4
NOTES = (
    "A step that follows a broken one starts from a broken engine. In every process memory that nobody has written",
    "is filled with NaN, so that no step is right by luck. Times are of single runs: `make bench` measures.",
)


class SourceError(RuntimeError):
    """What the demo's failing sender raises in the middle of an update."""


@dataclass
class Step:
    """One step of the sequence: what was asked, what happened, and whether the engine is exact afterwards.

    `serving` names the checkpoint that should be serving, `seconds` is the update alone, without the comparison.
    """

    title: str
    serving: str
    happened: str = ""
    equal: bool = False
    as_expected: bool = False
    differences: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    report: str = ""


# -- in the children -------------------------------------------------------------------------------------------------


class Voice:
    """Lines of JSON from a child to its parent; everything else that a child prints goes to the log file."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "w", buffering=1)

    def say(self, kind: str, **data: Any) -> None:
        """One message."""
        self._file.write(json.dumps({"kind": kind, **data}) + "\n")


def prepare(voice: Voice, family: str, cold: Path) -> None:
    """Make the checkpoints; load each cold with stock vLLM in another process and keep what it answers."""
    from weightlife.testing import checkpoints, oracle

    voice.say("doing", text=f"making checkpoints A and B of family {family} (or finding them)")
    folders = checkpoints.pair(family, BUILD / "checkpoints")
    # A cache of this run's own: what is compared with was measured minutes ago, on this machine.
    os.environ["WEIGHTLIFE_TESTING_CACHE"] = str(cold)
    for name, folder in zip("AB", folders, strict=True):
        voice.say("doing", text=f"loading {name} cold with stock vLLM, in a process of its own")
        fingerprint = oracle.cold(folder)
        (cold / f"{name}.fingerprint").write_text(json.dumps(fingerprint))
        voice.say("cold", name=name, tokens=fingerprint["tokens"][0])


class Engine:
    """The engine under test and the sequence of updates that it gets."""

    def __init__(self, voice: Voice, family: str, cold: Path, product: bool) -> None:
        from weightlife.testing import checkpoints, oracle

        self.voice = voice
        self.product = product
        self.oracle = oracle
        self.folders = dict(zip("AB", checkpoints.pair(family, BUILD / "checkpoints"), strict=True))
        self.want = {name: json.loads((cold / f"{name}.fingerprint").read_text()) for name in "AB"}
        # As in the cold loads: memory that nobody writes holds NaN instead of what happened to be there before.
        oracle.poison()
        self.llm: LLM

    def start(self) -> None:
        """Load A, as the engine's first load."""
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from weightlife.testing import transfer

        settings = WeightTransferConfig(backend=transfer.BACKEND)
        self.llm = LLM(**self.oracle.engine_arguments(self.folders["A"], weight_transfer_config=settings))

    def tensors(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a checkpoint, in file order."""
        from safetensors.torch import load_file

        for shard in sorted(self.folders[name].glob("*.safetensors")):
            yield from load_file(shard).items()

    def swap(self, name: str) -> None:
        """`reload_weights(weights_path=...)`, as vLLM documents it."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.folders[name])})

    def push(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        """`reload_weights(weights_iterator=...)`, as a trainer would."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream})

    def missing_one(self) -> None:
        """B without one of its tensors."""
        left_out = self.middle()
        self.push((name, tensor) for name, tensor in self.tensors("B") if name != left_out)

    def breaks_off(self) -> None:
        """B from a source that raises half way."""

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.tensors("B"):
                if name == self.middle():
                    raise SourceError("the trainer went away")
                yield name, tensor

        self.push(stream())

    def middle(self) -> str:
        """The name in the middle of the stream."""
        names = [name for name, _ in self.tensors("B")]
        return names[len(names) // 2]

    def in_pieces(self) -> None:
        """B as a weight-transfer session in pieces, with a request in the middle that must be answered by A."""
        names = [name for name, _ in self.tensors("B")]
        size = -(-len(names) // PIECES)
        self.llm.collective_rpc("start_weight_update")
        for start in range(0, len(names), size):
            piece = {"folder": str(self.folders["B"]), "names": names[start : start + size]}
            self.llm.collective_rpc("update_weights", kwargs={"update_info": piece})
            if start == size:
                self.require(self.oracle.fingerprint(self.llm)["tokens"], self.want["A"]["tokens"])
        self.llm.collective_rpc("finish_weight_update")

    @staticmethod
    def require(got: object, want: object) -> None:
        """Raise unless what was answered is what A answers."""
        if got != want:
            raise RuntimeError(f"the request in the middle got {got}, and A answers {want}")

    def step(
        self,
        title: str,
        serving: str,
        change: Callable[[], None],
        wanted: Callable[[BaseException], bool] | None = None,
    ) -> None:
        """Run one step, compare, and tell the parent.

        Args:
            title: what is asked for.
            serving: the checkpoint that should serve afterwards.
            change: the step.
            wanted: the step should raise an error of which this is true; None: it should not raise.
        """
        self.voice.say("doing", text=title)
        step = Step(title, serving)
        error: BaseException | None = None
        started = time.perf_counter()
        try:
            change()
        except Exception as problem:  # noqa: BLE001 - what is raised is what the table shows
            error = problem
        step.seconds = round(time.perf_counter() - started, 3)
        step.happened = "done, no error" if error is None else f"{type(error).__name__}: {error}"
        try:
            got = self.oracle.fingerprint(self.llm)
            step.tokens = got["tokens"][0]
            step.differences = self.oracle.differences(got, self.want[serving], names=("engine", "cold load"))
        except Exception as problem:  # noqa: BLE001 - a broken engine is a result
            step.differences = [f"no answer: {type(problem).__name__}: {problem}"]
        step.equal = not step.differences
        if wanted is None:
            step.as_expected = error is None and step.equal
        else:
            step.as_expected = error is not None and wanted(error) and step.equal
        if self.product:
            import weightlife

            report = weightlife.last_report(self.llm)
            step.report = report.summary_line() if report is not None else ""
            sys.stderr.write(f"\n== {title}\n{report}\n")
        self.voice.say("step", step=asdict(step))

    def run(self) -> None:
        """The whole sequence, the same with and without weightlife."""
        from weightlife import errors

        def names_it(error: BaseException) -> bool:
            return isinstance(error, errors.MissingTensorError) and self.middle() in error.tensors

        self.step("start the engine on A", "A", self.start)
        self.step("swap A -> B by path", "B", lambda: self.swap("B"))
        self.step("swap B -> A by path", "A", lambda: self.swap("A"))
        self.step("update to B, one tensor missing", "A", self.missing_one, names_it)
        self.step(
            "update to B, source raises half way", "A", self.breaks_off, lambda e: isinstance(e, SourceError)
        )
        self.step("update to B in pieces, a request in between", "B", self.in_pieces)
        self.step("swap B -> A by path", "A", lambda: self.swap("A"))


def child(options: argparse.Namespace) -> None:
    """What one child process does."""
    voice = Voice(options.voice)
    if options.child == "prepare":
        prepare(voice, options.family, options.cold)
        return
    if options.child == "weightlife":
        import weightlife

        weightlife.install()  # this line is the difference
    voice.say("doing", text="importing vLLM")
    Engine(voice, options.family, options.cold, options.child == "weightlife").run()


# -- in the parent ---------------------------------------------------------------------------------------------------


class Show:
    """Starts the children one after the other, prints what they say, and keeps it."""

    def __init__(self, family: str, screen: TextIO) -> None:
        self.family = family
        self.screen = screen
        self.began = time.monotonic()
        self.cold: dict[str, list[int]] = {}
        self.steps: dict[str, list[Step]] = {"stock": [], "weightlife": []}
        self.log = BUILD / "demo.log"

    def line(self, text: str = "") -> None:
        """A line for the person who watches."""
        self.screen.write(text + "\n")
        self.screen.flush()

    def run(self, what: str, cold: Path) -> None:
        """Run one child to its end."""
        source, sink = os.pipe()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WEIGHTLIFE")}
        environment |= ENVIRONMENT
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
        )
        if what != "weightlife":
            environment["WEIGHTLIFE"] = "0"
        command = [sys.executable, __file__, "--family", self.family, "--child", what]
        command += ["--cold", str(cold), "--voice", str(sink)]
        with self.log.open("a") as log:
            log.write(f"\n==== {what}\n")
            log.flush()
            process = subprocess.Popen(
                command, pass_fds=(sink,), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
            os.close(sink)
            alarm = threading.Timer(CHILD_TIMEOUT, process.kill)
            alarm.start()
            doing = self._listen(what, source)
            status = process.wait()
            alarm.cancel()
        if status != 0:
            self._ended(what, status, doing)

    def _listen(self, what: str, source: int) -> str:
        """Print what a child says until it closes its end; returns what it last was about to do."""
        doing = ""
        with os.fdopen(source) as voice:
            for text in voice:
                message = json.loads(text)
                if message["kind"] == "doing":
                    doing = message["text"]
                    self.line(f"  [{time.monotonic() - self.began:5.1f} s] {doing} ...")
                elif message["kind"] == "cold":
                    self.cold[message["name"]] = message["tokens"]
                else:
                    self.steps[what].append(Step(**message["step"]))
                    doing = ""
        return doing

    def _ended(self, what: str, status: int, doing: str) -> None:
        if what == "prepare":
            raise SystemExit(f"the set-up failed with status {status}; see {shown(self.log)}")
        how = f"the process died (status {status})"
        self.steps[what].append(
            Step(doing or "the end", "-", how, differences=["there is no engine any more"])
        )


def shown(path: Path) -> str:
    """A path as the reader would type it."""
    return str(path.relative_to(REPOSITORY))


def table(steps: list[Step], cold: dict[str, list[int]]) -> list[str]:
    """The steps as text: step, what happened, equal to a cold load, time."""
    widths = (27, 40, 30, 8)
    rule = "+".join("-" * (width + 2) for width in widths)

    def row(*cells: str) -> list[str]:
        columns = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, widths, strict=True)]
        height = max(map(len, columns))
        filled = [column + [""] * (height - len(column)) for column in columns]
        return [
            "|".join(f" {text:<{width}} " for text, width in zip(parts, widths, strict=True)).rstrip()
            for parts in zip(*filled, strict=True)
        ]

    out = [rule, *row("step", "what happened", "equal to a cold load?", "time"), rule]
    for step in steps:
        happened = textwrap.shorten(step.happened, 200, placeholder=" ...")
        equal = textwrap.shorten(judgement(step, cold), 150, placeholder=" ...")
        out += [*row(step.title, happened, equal, f"{step.seconds:.2f} s"), rule]
    return out


def judgement(step: Step, cold: dict[str, list[int]]) -> str:
    """What the comparison of one step found, in a sentence."""
    if step.equal:
        return f"yes, equal to {step.serving}"
    if not step.tokens:
        return f"NO: {step.differences[0]}"
    alike = [name for name, tokens in cold.items() if tokens == step.tokens]
    if any("NaN" in difference for difference in step.differences):
        how = "computes with NaN"
    elif alike:
        how = f"answers as {alike[0]}"
    else:
        how = f"answers as neither {' nor '.join(cold)}"
    return f"NO: {how}, should be {step.serving} ({len(step.differences)} differences)"


def verdict(show: Show) -> tuple[bool, list[str]]:
    """Whether everything held, and the sentences that end the demo."""
    stock, ours = show.steps["stock"], show.steps["weightlife"]
    began = bool(stock) and stock[0].equal
    held = began and len(ours) > 1 and all(step.as_expected for step in ours)
    wrong = [step for step in stock[1:] if not step.equal]
    silent = [step for step in wrong if step.happened.startswith("done")]
    right = len(stock) - len(wrong)
    lines = [
        f"Stock vLLM: {right} of {len(stock)} steps left the engine exact; {len(silent)} were wrong without an error."
    ]
    if not wrong:
        lines.append("With this version of vLLM and this family stock is right: try another --family.")
    good = sum(step.as_expected for step in ours)
    lines.append(f"weightlife: {good} of {len(ours)} steps went as they should.")
    if not began:
        lines.append("The first load of stock does not equal a cold load: nothing here can be judged.")
    lines.append("Everything held." if held else "NOT EVERYTHING HELD: see the table and the log.")
    return held, lines


def main() -> int:
    """The command line; 0 if everything held."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", default="mixtral", help="a family of weightlife.testing.checkpoints")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    for name, kind in (("--child", str), ("--cold", Path), ("--voice", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # an engine's farewell takes a second, and nothing is left to say
    BUILD.mkdir(parents=True, exist_ok=True)
    show = Show(options.family, sys.stderr if options.json else sys.stdout)
    show.log.write_text("")
    show.line("weightlife demo: the same updates on stock vLLM and under weightlife.install()")
    with tempfile.TemporaryDirectory(dir=BUILD, prefix="cold-") as cold:
        show.run("prepare", Path(cold))
        show.line("now stock vLLM (WEIGHTLIFE=0)")
        show.run("stock", Path(cold))
        show.line("now the same under weightlife.install()")
        show.run("weightlife", Path(cold))
    held, lines = verdict(show)
    seconds = round(time.monotonic() - show.began, 1)
    if options.json:
        document = {
            "schema_version": SCHEMA_VERSION, "family": options.family, "held": held, "seconds": seconds,
            "cold_tokens": show.cold, **{who: [asdict(s) for s in steps] for who, steps in show.steps.items()},
        }  # fmt: skip
        print(json.dumps(document, indent=2))
        return 0 if held else 1
    show.line()
    show.line(f"A cold load of A answers the first prompt with tokens {show.cold['A']},")
    show.line(f"a cold load of B with {show.cold['B']}.")
    for title, who in (("Stock vLLM", "stock"), ("The same under weightlife.install()", "weightlife")):
        show.line(f"\n{title}")
        show.line("\n".join(table(show.steps[who], show.cold)))
    show.line("\n".join(NOTES))
    show.line()
    show.line("\n".join(lines))
    show.line(f"{seconds} s. What vLLM logged, and a report of each update: {shown(show.log)}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
