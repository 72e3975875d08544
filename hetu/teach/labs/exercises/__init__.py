"""The files with blanks as students get them; `hetu lab export` packs them."""
