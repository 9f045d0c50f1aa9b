"""Files of a checkpoint that hold nothing of the model, and belong to it: the tokenizer's and generation's."""

import shutil
from pathlib import Path

from te_jax.core.check import warn
from te_jax.hf.files import name_in_errors
from te_jax.models.config import Origin

# What transformers writes for a tokenizer, its chat templates and generation, and vocabularies by what they are.
_CARRIED = (
    *("tokenizer*", "tokenization*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "spiece*"),
    *("sentencepiece*", "tekken*", "*.model", "*.tiktoken", "chat_template*", "additional_chat_templates/*"),
    "generation_config.json",
)


def carry(origin: Origin | None, to: Path) -> None:
    """Copies the files of `_CARRIED` that are there from the folder of `origin`, and none over one that is there.

    Warns where that folder is gone. Raises ValueError, naming it, for a file that cannot be written.
    """
    if origin is None:
        return
    folder = Path(origin.folder)
    if not folder.is_dir():
        warn(
            f"te_jax.hf.save: {folder}, which the model was read from, is gone; the files of its tokenizer and of "
            f"generation are not in {to}: put them there.",
        )
        return
    for path in sorted({path for name in _CARRIED for path in folder.glob(name) if path.is_file()}):
        there = to / path.relative_to(folder)
        if not there.exists():
            with name_in_errors(there, "written"):
                there.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, there)
