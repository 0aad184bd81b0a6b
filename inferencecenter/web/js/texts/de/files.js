// @ts-check
/** Texts of attached files. */

/** @type {import("../../i18n.js").PartOf<"files">} */
const texts = {
  "files.attached": "Angehängte Dateien",
  "files.reading": "Wird gelesen …",
  "files.remove": "Entfernen",
  "files.remove_one": "{name} entfernen",
  "files.dismiss": "Schließen: {name}",
  "files.characters": { one: "{n} Zeichen", other: "{n} Zeichen" },
  "files.tokens": { one: "{n} Token", other: "{n} Token" },
  "files.rest": { one: "{n} weiteres Zeichen wurde gesendet; Kopieren enthält es.", other: "{n} weitere Zeichen wurden gesendet; Kopieren enthält sie." },
  "files.unnamed": "Datei",
  "files.not_kept": "Sie ist angehängt, bleibt beim Neuladen der Seite aber nicht erhalten: Der Speicher des Browsers ist voll.",
  "files.unreadable": "Sie konnte nicht gelesen werden.",
  "files.image": "Bilder können nicht angehängt werden; das Modell liest Text.",
  "files.binary": "Kein Text: Das ist eine Binärdatei.",
  "files.encoding": "Sie ist nicht in UTF-8 kodiert. Speichern Sie sie in UTF-8 und hängen Sie sie erneut an.",
  "files.empty": "Sie ist leer.",
  "files.too_large": "Zu groß: Sie hat {size}, eine Nachricht höchstens {room}.",
  "files.too_many": "Eine Nachricht hat höchstens {most} Dateien.",
  "files.beyond_frame": "Zu groß: Mit ihr hat die Nachricht {size}, und {room} können auf einmal gesendet werden.",
  "files.beyond_context": "Zu lang: Sie hat {tokens} Token; im Kontext des Modells ist Platz für {limit}.",
  "files.beyond_context_with": "Zu lang: Sie hat {tokens} Token, und {others} sind angehängt; im Kontext des Modells ist Platz für {limit}.",
  "files.pdf_too_large": "Zu groß: Eine PDF-Datei darf {room} haben.",
  "files.pages": "Zu groß: Sie hat {pages} Seiten, und {most} werden gelesen.",
  "files.text_too_large": "Zu groß: Ihr Text hat mehr als {room}, so viel wie eine Nachricht haben darf.",
  "files.too_slow": "Sie zu lesen dauert zu lange.",
  "files.reader_failed": "Sie konnte nicht gelesen werden: Das Lesen von PDF-Dateien ist fehlgeschlagen.",
  "files.protected": "Sie ist verschlüsselt und wird mit ihrem Kennwort gelesen.",
  "files.wrong_password": "Das Kennwort ist falsch.",
  "files.password": "Kennwort von {name}",
  "files.password_short": "Kennwort",
  "files.unlock": "Lesen",
  "files.damaged": "Sie konnte nicht gelesen werden: Die PDF-Datei ist beschädigt.",
  "files.pictures": "Sie enthält keinen lesbaren Text: Ihre Seiten sind Bilder, oder ihre Schriften benennen die Zeichen nicht.",
};

export default texts;
