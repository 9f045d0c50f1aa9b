"""What `python -m benchmarks` says of options that it cannot use."""

import pytest

from benchmarks.__main__ import main


@pytest.mark.parametrize("option", [("--repeat", "0"), ("--calls", "-1"), ("--calls", "2.5"), ("--only", "[")])
def test_options_are_checked(option, capsys):
    with pytest.raises(SystemExit) as status:
        main(["layers", "--list", *option])
    assert status.value.code == 2 and f"{option[0]}: {option[1]!r} is no " in capsys.readouterr().err


@pytest.mark.parametrize("option", [(), ("--folder", "/nosuch")])
def test_another_tree_is_asked_for(option, capsys):
    assert main(["trees", *option]) == 2
    assert "give the root of another source tree" in capsys.readouterr().out
