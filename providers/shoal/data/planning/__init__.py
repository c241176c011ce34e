"""Which worker reads which rows. Pure: footers' numbers in, row ranges out."""
