"""`python -m rankfold`"""

from .cli import main

main()
