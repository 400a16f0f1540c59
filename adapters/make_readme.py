"""Write ``README.md`` of this folder from the facts table and the recipes beside it."""

from pathlib import Path

from glm_lora.targets.matrix import readme

FOLDER = Path(__file__).parent

if __name__ == "__main__":
    (FOLDER / "README.md").write_text(readme(FOLDER), encoding="utf-8")
