"""Overrides the globals of the script that runs this text: a config file, then --key=value."""

import sys
from ast import literal_eval

for argument in sys.argv[1:]:
    if "=" not in argument:
        with open(argument) as file:
            print(f"overriding with {argument}")
            exec(file.read())
    else:
        key, _, value = argument.removeprefix("--").partition("=")
        if key not in globals():
            raise ValueError(f"unknown key: {key}")
        globals()[key] = literal_eval(value)
        print(f"overriding: {key} = {value}")
