"""The commands of ``oeprov``: what they take and how they explain it; each calls one function elsewhere."""
