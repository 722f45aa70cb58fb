"""Packaging of lightconv-plugin: `pip install .[fairseq]` gives the models, `pip install .` the operators alone.

fairseq owns one package name in two distributions: 0.12.2 is the last for Python 3.10, fairseq-fixed the one for 3.11
and later. Installing it takes some care with its build; scripts/setup.sh does it in the right order.
"""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="lightconv-plugin",
    version="0.1.0",
    description="LightConv and DynamicConv for fairseq: operators, models, recipes",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=find_packages(include=["lightconv_plugin", "lightconv_plugin.*"]),
    install_requires=[
        "torch>=2.6",
        "ninja",
        "sacrebleu>=2.4",
        "sacremoses>=0.1",
        "sentencepiece>=0.2",
        "subword-nmt>=0.3.8",
        "tqdm",
    ],
    extras_require={
        "fairseq": [
            "fairseq==0.12.2; python_version < '3.11'",
            "fairseq-fixed==0.12.3.1; python_version >= '3.11'",
        ],
        "test": ["pytest>=8", "pytest-xdist>=3", "ruff>=0.6"],
    },
    entry_points={"console_scripts": ["lightconv = lightconv_plugin.tools.cli:main"]},
)
