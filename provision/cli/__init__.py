"""The commands of ``oeprov``: options, prompts, tables. Each command calls one function of a lower floor."""
