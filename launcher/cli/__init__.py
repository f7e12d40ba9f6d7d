"""What users type: the table of commands, and the parser of their command lines."""
