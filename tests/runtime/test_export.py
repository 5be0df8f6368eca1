"""The exported folder appears whole, and a killed export leaves nothing that stays."""

from tasks.runtime.export import _replace


def test_the_new_folder_takes_the_place_and_leftovers_go(tmp_path):
    new, old, left = (tmp_path / name for name in (".model.tmp", "model", ".model.old"))
    for folder in (new, old, left):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    _replace(new, old)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (old / "config.json").read_text() == ".model.tmp"
