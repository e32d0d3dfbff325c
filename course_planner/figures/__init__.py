"""What plans draw (`plans`), and the pictures of the chapters that are about them."""
