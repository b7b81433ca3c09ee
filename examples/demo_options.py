"""The demo's options, apart so that demo.py checks them without importing torch."""

import argparse

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def add_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("--real-size", action="store_true", help="V4-Flash's true dimensions (12 GiB a layer in bf16)")
    parser.add_argument("--layers", type=int, help="number of layers (default: 6, with --real-size 4)")
    parser.add_argument("--prompt-tokens", type=int, help="length of the prompt (default: 300, with --real-size 2560)")
    parser.add_argument("--tokens", type=int, default=16, help="greedy tokens to generate (default: 16)")
    parser.add_argument(
        "--runs", type=int, default=5, help="timed runs of each model, after one to warm up (default: 5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: bf16 on a GPU, fp32 on a CPU)")
    parser.add_argument(
        "--reference",
        choices=("fp64", "fp32", "none"),
        help="precision to compare with (default: fp64, with --real-size fp32)",
    )
