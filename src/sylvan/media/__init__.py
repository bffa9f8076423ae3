"""Images, videos and sounds as clients send them: fetched, decoded and prepared; no torch here."""
