"""Options of the example programs that are numbers: what is out of range ends in a line that names the option."""

import argparse
import contextlib
import io

import pytest
from example_runs import EXAMPLES  # noqa: F401  (the examples' folder is on the path)

import finetune_lora  # isort: skip
import generate  # isort: skip
from gpt import config  # isort: skip
from gpt.numbers import _Number  # isort: skip
from tasks import loop  # isort: skip

WORDS = ["-1", "-0.5", "0", "nan", "inf", "-inf", "1e400", "9" * 30, "word", "", "0x10", "1e-400"]
FROM_0 = {  # options of each program that take 0
    "train_gpt": "--seed --checkpoint-every --check-gap --check-against --process-id --warmup --eval-every "
    "--eval-batches --dropout",
    "generate": "--seed --top-k",
    "finetune_lora": "--seed --check-gap",
    "tasks": "--seed --check-gap",
}
TINY = {"--check-gap", "--check-against", "--dropout"}  # 1e-400 is 0


class Found(Exception):
    """The parser of a program."""


def parser_of(program) -> argparse.ArgumentParser:
    """The parser that `program`, a function of the command line, makes."""
    parsed = argparse.ArgumentParser.parse_args

    def caught(self, *arguments):
        raise Found(self)

    argparse.ArgumentParser.parse_args = caught
    try:
        program([])
    except Found as found:
        return found.args[0]
    finally:
        argparse.ArgumentParser.parse_args = parsed
    raise AssertionError("it parses nothing")


PARSERS = {
    "train_gpt": config.parser,
    "generate": lambda: parser_of(generate.main),
    "finetune_lora": lambda: parser_of(finetune_lora.parse),
    "tasks": lambda: parser_of(lambda argv: loop.main(None, argv, "")),
}


@pytest.mark.parametrize("program", PARSERS)
def test_numbers_out_of_range(program):
    parser, count, wrong = PARSERS[program](), 0, []
    numbers = [action for action in parser._actions if isinstance(action, _Number)]
    assert not [action for action in parser._actions if action.type in (int, float)], "an option without a range"
    assert len(numbers) >= 3
    for action in numbers:
        (option,) = action.option_strings
        zero = option in FROM_0[program].split()
        taken = {"0": zero, "1e-400": zero and option in TINY}
        for text in WORDS:
            count += 1
            said = io.StringIO()
            with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
                parser.parse_args([f"{option}={text}"])
                said.write("taken")
            last = said.getvalue().splitlines()[-1]
            due = "taken" if taken.get(text) else f"error: {option} is {text[:29]}"
            wrong += [] if due in last else [(option, text, last)]
    assert not wrong and count == len(numbers) * len(WORDS)


@pytest.mark.parametrize("program", ["train_gpt", "generate", "finetune_lora"])
def test_what_is_in_range_is_taken(program):
    parser = PARSERS[program]()
    args = parser.parse_args(["--seed", "3"] + (["--lr", "1e-3", "--warmup", "0"] if program == "train_gpt" else []))
    assert args.seed == 3 and type(args.seed) is int
