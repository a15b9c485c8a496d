"""Model folders with any name, in any locale, through all processes."""

import os
import subprocess
import sys

import pytest
from raw_files import model_folder
from tokenizers_made import byte_level, tokenizer_folder

from ringcore import LLM
from ringcore.errors import ModelLoadError
from ringcore.host.file_names import as_file_name, as_utf8

SCRIPT = """
import logging, sys
from ringcore import LLM, SamplingParams
from ringcore.cli import main
from ringcore.errors import RingcoreError
options = dict(load_format="dummy", device="cpu", kv_cache_bytes=1 << 20, dtype="float32", max_num_seqs=2)
for model in (sys.argv[1], {name!r}):
    with LLM(model, **options) as llm:
        print(len(llm.generate(["a"], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)), flush=True)
    logging.warning("the model %s", model)
try:
    LLM(sys.argv[1] + "/\\u00fc", **options)
except RingcoreError as error:
    print(type(error).__name__, ascii(error.message))
flags = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
main(["generate", "--model", sys.argv[1], "--prompt", "a", "--max-tokens", "5", *flags])
"""


@pytest.mark.long_form
def test_a_folder_with_other_letters_in_a_locale_without_them(tmp_path):
    name = str(tmp_path / "modèle-模型")
    tokenizer_folder(model_folder(tmp_path / "modèle-模型", vocab_size=512, eos_token_id=None), byte_level())
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHONIO"))}
    environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{name!r}", ascii(name)), name],
        capture_output=True,
        env=environment,
        timeout=300,
    )
    lines = done.stdout.decode("ascii").splitlines()
    assert lines[:2] == ["1", "1"], done.stderr.decode(errors="replace")
    assert lines[2].startswith("ModelLoadError")
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"UnicodeEncodeError" not in done.stderr


def test_a_name_that_is_no_utf8_is_a_typed_error(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/mod\xe8le")
    os.mkdir(folder)
    tokenizer_folder(model_folder(tmp_path / "m"), byte_level())
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "m" / name).rename(f"{folder}/{name}")
    with pytest.raises(ModelLoadError, match=r"mod\\udce8le'?.*: its name is not UTF-8; rename"):
        LLM(folder, load_format="dummy", device="cpu")


def test_names():
    assert as_utf8("modèle") == "modèle"
    assert as_utf8(os.fsdecode("modèle".encode())) == "modèle"
    assert os.fsencode(as_file_name("modèle")) == "modèle".encode()
