// @ts-check
/** Texts of attached files. */

/** @satisfies {Readonly<Record<string, import("../../i18n.js").Text>>} */
const texts = {
  "files.attached": "Attached files",
  "files.reading": "Reading…",
  "files.remove": "Remove",
  "files.remove_one": "Remove {name}",
  "files.dismiss": "Dismiss: {name}",
  "files.characters": { one: "{n} character", other: "{n} characters" },
  "files.tokens": { one: "{n} token", other: "{n} tokens" },
  "files.rest": { one: "{n} more character was sent; Copy has it.", other: "{n} more characters were sent; Copy has them." },
  "files.unnamed": "file",
  "files.not_kept": "It is attached, but is not kept if the page is reloaded: the browser's storage is full.",
  "files.unreadable": "It could not be read.",
  "files.image": "Images cannot be attached; the model reads text.",
  "files.binary": "Not text: this is a binary file.",
  "files.encoding": "Its encoding is not UTF-8. Save it as UTF-8 and attach it again.",
  "files.empty": "It is empty.",
  "files.too_large": "Too large: it has {size}, and a message {room} at most.",
  "files.too_many": "A message has at most {most} files.",
  "files.beyond_frame": "Too large: with it the message has {size}, and at most {room} can be sent at once.",
  "files.beyond_context": "Too long: it has {tokens} tokens; the model's context has room for {limit}.",
  "files.beyond_context_with": "Too long: it has {tokens} tokens, and {others} are attached; the model's context has room for {limit}.",
  "files.pdf_too_large": "Too large: a PDF may have {room}.",
  "files.pages": "Too large: it has {pages} pages, and {most} are read.",
  "files.text_too_large": "Too large: its text has more than {room}, as much as a message may have.",
  "files.too_slow": "It takes too long to read.",
  "files.reader_failed": "It could not be read: the PDF reader failed.",
  "files.protected": "It is encrypted; its password is required.",
  "files.wrong_password": "The password is wrong.",
  "files.password": "Password of {name}",
  "files.password_short": "Password",
  "files.unlock": "Read",
  "files.damaged": "It could not be read: the PDF is damaged.",
  "files.pictures": "It has no text that can be read: its pages are pictures, or its fonts do not name their characters.",
};

export default texts;
