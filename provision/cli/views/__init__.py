"""What commands print: tables and the lines around them."""
