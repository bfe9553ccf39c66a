"""Operations on letters: redrive, edit, discard; safe against crashes and each other."""
